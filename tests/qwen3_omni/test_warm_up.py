"""What stages of Qwen3-Omni compute before they are ready on a GPU."""

from typing import Any
from unittest import mock

from services.talker.warm_up import warm_up as warm_up_talker
from services.thinker.warm_up import warm_up as warm_up_thinker
from tests.qwen3_omni.test_talker import Talking, talking
from tests.support.thinking import ThinkerRig

__all__ = ["talking"]


def model_of(engine: Any) -> Any:
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()


def test_the_talker_completes_frames(talking: Talking) -> None:
    engine = talking.service._engine
    predictor = model_of(engine).code_predictor
    with mock.patch.object(predictor, "forward", wraps=predictor.forward) as completed:
        warm_up_talker(engine, talking.service._rules)
    assert {call.args[0].shape[0] for call in completed.call_args_list} >= {1, 2, 8}
    assert talking.service._scheduler.requests == {}
    assert talking.service._scheduler.held_bytes == 0


def test_the_thinker_hears_and_sees(thinker: ThinkerRig) -> None:
    model = model_of(thinker.engine)
    with (
        mock.patch.object(model.audio_tower, "forward", wraps=model.audio_tower.forward) as heard,
        mock.patch.object(model.visual, "forward", wraps=model.visual.forward) as seen,
    ):
        warm_up_thinker(thinker.engine, thinker.service._media, thinker.service._end_tokens)
    assert heard.call_count > 2
    assert seen.call_count >= 3
    assert thinker.scheduler.requests == {}
    assert thinker.steps.free_blocks == thinker.steps.blocks
