"""What the talker computes before it is ready on a GPU: replies, of which nothing is left."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from omnirelay.errors import StageStartError
from services.families.qwen2_5_omni.talker.family import TALKER
from services.talker import engine as talker_engine
from services.talker.warm_up import warm_up
from shared.config import EngineConfig, TalkerConfig
from shared.vllm.sampling.drawing import DrawProcessor
from tests.support.answers import Reference, random_prompt
from tests.support.talking import TalkerRig


def test_replies_are_spoken_and_nothing_is_left(
    talker: TalkerRig, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = talker.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model, draws, batches = runner.get_model(), [], []
    compute, apply = model.compute_logits, DrawProcessor.apply

    def computed(hidden: torch.Tensor, *rest: Any) -> Any:
        batches.append(hidden.shape[0])
        return compute(hidden, *rest)

    def applied(processor: DrawProcessor, logits: torch.Tensor) -> torch.Tensor:
        draws.append(len(processor._requests))
        return apply(processor, logits)

    monkeypatch.setattr(model, "compute_logits", computed)
    monkeypatch.setattr(DrawProcessor, "apply", applied)
    warm_up(talker.engine, talker.service._rules)
    assert set(batches) >= {1, 2, 8}
    assert max(draws) == 4
    talker.check_empty()
    assert runner.requests == {}
    assert talker.scheduler.requests == {}
    counted = [metric for metric in talker.service.collect() if "kv_cache" not in metric.name]
    assert {sample.value for metric in counted for sample in metric.samples} == {0.0}
    answer = reference.answer(random_prompt(9), thinker_max_new_tokens=20, talker_max_new_tokens=30)
    talker.take("a", answer, max_tokens=30)
    talker.run()
    assert talker.codes("a") == answer.codes


def test_a_gpu_s_talker_begins_with_it_and_fails_with_it(tiny_checkpoint: Path) -> None:
    config = TalkerConfig(http=None, engine=EngineConfig(max_model_len=256, kv_cache_memory_bytes=2**24))
    failing = mock.patch(
        "services.talker.scheduler.ConditioningTrack.read", side_effect=ArithmeticError("no")
    )
    with (
        mock.patch.object(talker_engine, "current_platform", mock.Mock(is_cpu=lambda: False)),
        failing,
        pytest.raises(StageStartError, match=r"before the stage is ready failed: .*no"),
    ):
        talker_engine.build_talker(TALKER, tiny_checkpoint, config)


def test_metrics_are_kept_again_afterwards(talker: TalkerRig) -> None:
    kept = talker.engine.logger_manager
    warm_up(talker.engine, talker.service._rules)
    assert talker.engine.logger_manager is kept is not None
