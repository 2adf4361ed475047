"""A talker as on GPUs: what it computes before it is ready, of which nothing is left, and its steps."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from omnirelay.errors import StageStartError
from services.families.qwen2_5_omni.talker import TALKER
from services.talker import engine as talker_engine
from services.talker.engine import warm_up
from shared.config import EngineConfig, TalkerConfig
from shared.vllm.sampling.drawing import DrawProcessor
from tests.support.answers import Reference
from tests.support.steps import compiled, declared, linted
from tests.support.talking import TalkerRig, ask, check_codes


def test_replies_are_spoken_and_nothing_is_left(
    talker: TalkerRig, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = talker.runner
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
    answer = ask(reference, 9, talker_max_new_tokens=30)
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


def test_the_decoder_reads_its_inputs_where_they_were(
    talker: TalkerRig, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs read them where they were captured, compiled code with the strides that it first saw."""
    runner = talker.runner
    model = runner.get_model()
    seen: list[tuple[int, list[tuple[int, tuple[int, ...]]]]] = []
    forward = model.model.forward

    def watched(ids: None, positions: torch.Tensor, intermediate: Any, inputs: torch.Tensor) -> Any:
        given = [(each.data_ptr(), each.stride()) for each in (positions, inputs, model.rotary.cos_sin_cache)]
        seen.append((inputs.shape[0], given))
        return forward(ids, positions, intermediate, inputs)

    monkeypatch.setattr(model.model, "forward", watched)
    answers = {f"r{length}": ask(reference, length, talker_max_new_tokens=30) for length in (9, 130)}
    # vLLM measures memory without rows.
    runner._dummy_run(16)
    for name, answer in answers.items():
        talker.take(name, answer, max_tokens=30)
    talker.run()
    check_codes(talker, answers)
    assert {count for count, _ in seen} >= {16, 11 + 132, 2}
    assert all(given == seen[0][1] for _, given in seen)


def test_the_decoder_is_traced_whole_and_nothing_in_a_step_waits(
    talker: TalkerRig, reference: Reference
) -> None:
    runner = talker.runner
    model = runner.get_model()
    answers = {f"r{length}": ask(reference, length, talker_max_new_tokens=20) for length in (9, 130)}

    def spoken() -> dict[str, list[int]]:
        talker.forget()
        for name, answer in answers.items():
            talker.take(name, answer, max_tokens=20)
        talker.run()
        return {name: talker.codes(name) for name in answers}

    expected = {name: answer.codes for name, answer in answers.items()}
    with linted(model) as counts:
        assert spoken() == expected
    assert min(counts) > 20
    with declared(model.model) as lint:
        assert spoken() == expected
    assert "vllm::unified_attention_with_output" in lint.written
    with compiled(model.model) as graphs:
        assert spoken() == expected
    # Prompts and several requests are of one; PyTorch makes another of a single token.
    assert 1 <= len(graphs) <= 2
