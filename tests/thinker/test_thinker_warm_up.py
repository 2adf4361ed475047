"""A thinker as on GPUs: what it computes before it is ready, of which nothing is left, and its steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker import gpu_model_runner

from omnirelay.errors import StageStartError
from services.families.qwen2_5_omni.thinker import THINKER, SpeakingThinker
from services.thinker import engine as thinker_engine
from services.thinker.engine import warm_up
from shared.config import MediaConfig, ThinkerConfig, ThinkerEngineConfig
from shared.vllm.sampling.drawing import DrawProcessor
from tests.support.answers import random_prompt
from tests.support.http import Readings
from tests.support.steps import compiled, declared, linted
from tests.support.thinking import MakeThinker, ThinkerRig, speech_of, thinker_request


def run(rig: ThinkerRig) -> None:
    warm_up(rig.engine, rig.service._media, rig.service._end_tokens)


def vllm_metrics() -> Iterator[Metric]:
    return (metric for metric in REGISTRY.collect() if metric.name.startswith("vllm"))


def test_each_path_is_computed_and_nothing_is_left(make_thinker: MakeThinker, tiny_checkpoint: Any) -> None:
    rig = make_thinker(tiny_checkpoint)
    runner, scheduler = rig.runner, rig.scheduler
    model = runner.get_model()
    media: list[set[str]] = []
    embed, sample, apply = model.embed_multimodal, runner._sample, DrawProcessor.apply
    batches: list[int] = []
    logprobs: list[int | None] = []
    drawn: set[tuple[bool, bool]] = set()

    def embedded(**given: Any) -> Any:
        media.append({name for name in given if given[name] is not None})
        return embed(**given)

    def sampled(logits: torch.Tensor, *rest: Any) -> Any:
        batches.append(logits.shape[0])
        logprobs.append(runner.input_batch.sampling_metadata.max_num_logprobs)
        return sample(logits, *rest)

    def applied(processor: DrawProcessor, logits: torch.Tensor) -> torch.Tensor:
        drawn.update((bool(each.draws.top_k), each.draws.top_p < 1) for each in processor._requests.values())
        return apply(processor, logits)

    with (
        mock.patch.object(model, "embed_multimodal", embedded),
        mock.patch.object(runner, "_sample", sampled),
        mock.patch.object(DrawProcessor, "apply", applied),
        mock.patch.object(gpu_model_runner, "apply_grammar_bitmask", wraps=apply_grammar_bitmask) as guided,
    ):
        vllm, ours = Readings(vllm_metrics()), Readings(rig.service.collect())
        run(rig)
    assert guided.called
    kinds = {"input_audio_features", "pixel_values", "pixel_values_videos"}
    assert kinds <= set().union(*media)
    assert max(batches) == 8
    assert 5 in logprobs
    assert drawn == {(False, False), (True, True), (False, True)}
    assert Readings(vllm_metrics())._values == vllm._values
    assert Readings(rig.service.collect())._values == ours._values
    assert scheduler.requests == {}
    assert rig.steps.free_blocks == rig.steps.blocks
    assert runner.requests == {}
    assert runner.encoder_cache == {}
    assert not scheduler.encoder_cache_manager.cached
    assert not rig.service._preparer._cache
    assert not rig.service._grammars._cache
    assert rig.service.active_requests() == []
    assert scheduler.piece._without_s is None
    # The first real request finds nothing in the prefix cache, not even the same prompt's.
    rig.run(thinker_request("a", [0] * 64, speech=speech_of(), max_tokens=4))
    assert rig.usage("a").cached_tokens == 0


def test_a_gpu_s_thinker_begins_with_it_and_fails_with_it(tiny_checkpoint: Path) -> None:
    engine = ThinkerEngineConfig(max_model_len=512, kv_cache_memory_bytes=2**24)
    with (
        mock.patch.object(thinker_engine, "current_platform", mock.Mock(is_cpu=lambda: False)),
        mock.patch.object(SpeakingThinker, "_process_audio_input", side_effect=ArithmeticError("no")),
        pytest.raises(StageStartError, match=r"before the stage is ready failed: .*no"),
    ):
        thinker_engine.build_thinker(
            THINKER, tiny_checkpoint, ThinkerConfig(http=None, engine=engine), MediaConfig()
        )


def test_what_a_thinker_would_refuse_is_left_out(make_thinker: MakeThinker, tiny_checkpoint: Path) -> None:
    rig = make_thinker(tiny_checkpoint, max_model_len=64, media=MediaConfig(max_images=0, max_videos=0))
    model = rig.runner.get_model()
    with mock.patch.object(model, "_process_audio_input", wraps=model._process_audio_input) as heard:
        run(rig)
    # Of a second, not of eight.
    assert heard.call_count == 1


def test_the_decoder_is_traced_whole_and_nothing_in_a_step_waits(thinker: ThinkerRig) -> None:
    runner = thinker.runner
    model = runner.get_model()

    def answered() -> list[list[int]]:
        thinker.forget()
        # All of a prompt is computed each time.
        assert thinker.engine.reset_prefix_cache()
        names = {f"r{length}": random_prompt(length) for length in (9, 130)}
        thinker.run(
            *(
                thinker_request(name, prompt, speech=speech_of(), max_tokens=12)
                for name, prompt in names.items()
            )
        )
        return [thinker.text(name) for name in names]

    expected = answered()
    with linted(model) as counts:
        assert answered() == expected
    assert min(counts) > 20
    with declared(model.language_model.model) as lint:
        assert answered() == expected
    assert "vllm::unified_attention_with_output" in lint.written
    with compiled(model.language_model.model) as graphs:
        assert answered() == expected
    # Prompts and several requests are of one; PyTorch makes another of a single token.
    assert 1 <= len(graphs) <= 2
