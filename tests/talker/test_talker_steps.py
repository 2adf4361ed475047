"""What a step hands to the decoder: at the same place each time, whatever the step holds."""

from typing import Any

import pytest
import torch

from tests.support.answers import Reference, random_prompt
from tests.support.compiled import compiled
from tests.support.lint import linted
from tests.support.talking import TalkerRig


def test_the_decoder_reads_its_inputs_where_they_were(
    talker: TalkerRig, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs read them where they were captured, compiled code with the strides that it first saw."""
    runner = talker.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()
    seen: list[tuple[int, list[tuple[int, tuple[int, ...]]]]] = []
    forward = model.model.forward

    def watched(ids: None, positions: torch.Tensor, intermediate: Any, inputs: torch.Tensor) -> Any:
        given = [(each.data_ptr(), each.stride()) for each in (positions, inputs, model.rotary.cos_sin_cache)]
        seen.append((inputs.shape[0], given))
        return forward(ids, positions, intermediate, inputs)

    monkeypatch.setattr(model.model, "forward", watched)
    answers = {
        f"r{length}": reference.answer(
            random_prompt(length), thinker_max_new_tokens=20, talker_max_new_tokens=30
        )
        for length in (9, 130)
    }
    # vLLM measures memory without rows.
    runner._dummy_run(16)
    for name, answer in answers.items():
        talker.take(name, answer, max_tokens=30)
    talker.run()
    assert {name: talker.codes(name) for name in answers} == {
        name: answer.codes for name, answer in answers.items()
    }
    assert {count for count, _ in seen} >= {16, 11 + 132, 2}
    assert all(given == seen[0][1] for _, given in seen)


def test_the_decoder_is_traced_whole_and_nothing_in_a_step_waits(
    talker: TalkerRig, reference: Reference
) -> None:
    runner = talker.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()
    answers = {
        f"r{length}": reference.answer(
            random_prompt(length), thinker_max_new_tokens=20, talker_max_new_tokens=20
        )
        for length in (9, 130)
    }

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
    with compiled(model.model) as graphs:
        assert spoken() == expected
    # Prompts and several requests are of one; PyTorch makes another of a single token.
    assert 1 <= len(graphs) <= 2
