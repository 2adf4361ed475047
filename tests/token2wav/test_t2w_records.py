"""Steps of the solver and pieces of audio as GPUs compute them: recorded once, and repeated."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAntiAliasedActivation1d

from benchmarks.gpu.bare import synthesizer_of
from services.families.qwen2_5_omni.token2wav import dit
from services.families.qwen2_5_omni.token2wav.blocks import filled_size
from services.families.qwen2_5_omni.token2wav.synthesizer import SolverSynthesizer
from services.families.qwen2_5_omni.token2wav.vocoder import AntiAliasedActivation
from services.token2wav.chunks import StreamState
from services.token2wav.engine import SynthesisEngine
from shared.vllm.recorded import Recorded, Tensors, _like, _tensors
from tests.support import steps
from tests.token2wav.support import play, pooler_of, solving, stream_of

TOLERANCE = 1e-5


@pytest.fixture(params=["engine", "other_engine"])
def plain(request, scale) -> Iterator[SynthesisEngine]:
    engine = request.getfixturevalue(request.param)
    with solving(engine, guidance_scale=scale):
        yield engine


@pytest.fixture
def recorded(plain, monkeypatch) -> Iterator[SolverSynthesizer]:
    """The engine's synthesizer as on a GPU; CUDA graphs are the recorder's."""
    own = pooler_of(plain).synthesizer
    made = SolverSynthesizer(own._dit, own._vocoder, own._conditioner, own._work, True, steps.record)
    monkeypatch.setattr(pooler_of(plain), "_of_model", (made,))
    yield made
    assert not plain.has_work


def heard(engine: SynthesisEngine, blocks: list[float]) -> list[torch.Tensor]:
    """Streams of so many blocks beside each other, each a few steps later than the one before."""
    lengths = [round(each * engine.geometry.codes_per_block) for each in blocks]
    streams = {
        number: stream_of(
            engine, [(number + 7 * index) % 64 for index in range(length)], number, max_blocks=3
        )
        for number, length in enumerate(lengths)
    }
    return list(play(engine, streams, {number: 3 * number for number in streams}).values())


@pytest.mark.parametrize("scale", [0.5, 0.0])
@pytest.mark.parametrize("blocks", [[6.7], [3.3, 2.5, 4.2]])
def test_streams_of_repeated_records_equal_those_computed(plain, monkeypatch, request, blocks):
    expected = heard(plain, blocks)
    synthesizer = request.getfixturevalue("recorded")
    for got, wanted in zip(heard(plain, blocks), expected, strict=True):
        assert wanted.std() > 0.01
        assert (got - wanted).abs().max() < TOLERANCE
    # The other engine makes audio in pieces of at most 7 frames.
    assert 1 <= synthesizer._solve.sizes <= 12
    assert 1 <= synthesizer._make_audio.sizes <= 24


@pytest.fixture(params=["oracle", "other_oracle"])
def bare(request) -> SolverSynthesizer:
    """Transformer and vocoder with PyTorch's linear layers, as Dynamo and other devices want them."""
    oracle = request.getfixturevalue(request.param)
    return synthesizer_of(oracle.model.config, oracle.path, oracle.model.state_dict(), torch.device("cpu"))


def steps_of_a_stream(
    synthesizer: SolverSynthesizer, oracle: Any, guided: bool = True
) -> Iterator[tuple[Any, ...]]:
    """What the solver's steps are given for chunks of 1 to 6 blocks, all but the first behind another one."""
    config = synthesizer._dit.config
    synthesizer._conditioner._guided = guided
    block, stream, start = config.block_size // config.repeats, StreamState(), 0
    for blocks in range(1, 7):
        chunk = oracle.chunk(
            (blocks + 1) * block,
            start=start,
            target_end=start + blocks * config.block_size,
            stream=stream,
            is_last=False,
        )
        state = synthesizer.prepare(chunk)
        for step in (0, 3):
            batch = synthesizer._conditioner.batch([state], fill=True)
            yield (
                batch.mel([state]),
                batch.evaluations([4 * step]),
                batch.carry.take([4 * step]),
                batch.tensors,
            )
        start = chunk.target_end


def pieces(synthesizer: SolverSynthesizer) -> Iterator[Tensors]:
    """What the vocoder is given in a stream: of all sizes, the first without frames before it."""
    block, width = synthesizer._dit.config.block_size, synthesizer._dit.config.mel_dim
    context = synthesizer._vocoder.context.left
    generator = torch.Generator().manual_seed(1)
    for left, blocks in ((context, 1), (context, 2), (context, 4), (context, 8)):
        for count in (2, 4):
            yield tuple(
                torch.randn(count, frames, width, generator=generator) - 3
                for frames in (left, blocks * block + 2, block - 2)
            )


@pytest.mark.long
@torch.no_grad()
def test_both_models_are_traced_whole(request, bare, monkeypatch):
    """Dynamo raises where what is computed depends on what tensors hold; activations are the reference's."""
    monkeypatch.setattr(AntiAliasedActivation, "forward", Qwen2_5OmniAntiAliasedActivation1d.forward)
    oracle = request.getfixturevalue(request.node.callspec.params["bare"])
    cases: list[tuple[Callable[..., Any], Tensors]] = [
        (bare._dit.step, list(steps_of_a_stream(bare, oracle))[-1]),
        (bare._vocoder, next(pieces(bare))),
    ]
    for model, inputs in cases:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
        for got, expected in zip(_tensors(compiled(*inputs)), _tensors(model(*inputs)), strict=True):
            assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.long
@torch.no_grad()
def test_layers_are_compiled_once_of_a_kind_for_all_sizes_and_equal_plain_ones(request, bare, monkeypatch):
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    oracle = request.getfixturevalue(request.node.callspec.params["bare"])
    torch._dynamo.reset()
    made = torch.compile(dit.DiTLayer.forward, backend=backend, fullgraph=True)
    monkeypatch.setattr(dit, "compiled_layer", made)
    # Workers on a CPU compile nothing.
    with torch.compiler.set_stance("default"):
        for guided in (True, False):
            for inputs in steps_of_a_stream(bare, oracle, guided):
                expected, got = (bare._dit.step(*inputs, compiled=each) for each in (False, True))
                for one, other in zip(got, expected, strict=True):
                    assert (one - other).abs().max() < TOLERANCE * other.abs().max()
    torch._dynamo.reset()
    kinds = {(each.looks_back, each.attn._ahead) for each in bare._dit.transformer_blocks}
    assert len(graphs) == len(kinds) > 1


@torch.no_grad()
def test_on_another_device_nothing_waits_for_it_or_copies_to_it(request, bare):
    """On the device ``meta`` the paths of GPUs are taken; nothing is computed there."""
    oracle = request.getfixturevalue(request.node.callspec.params["bare"])
    inputs = [*list(steps_of_a_stream(bare, oracle))[-1:], *list(pieces(bare))[-1:]]
    bare._dit.to("meta")
    bare._vocoder.to("meta")
    for model, each in zip((bare._dit.step, bare._vocoder), inputs, strict=True):
        there = _like(each, (tensor.to("meta") for tensor in _tensors(each)))
        with steps.Recorder() as calls:
            results = list(_tensors(model(*there)))
        assert len(calls.calls) > 100
        assert all(result.is_meta for result in results)


def test_a_record_shows_what_is_not_a_function_of_its_inputs():
    factor = 2.0

    def scaled(values: torch.Tensor) -> Tensors:
        return (values * factor,)

    repeated = Recorded(scaled, steps.record)
    assert torch.equal(repeated(torch.ones(3))[0], torch.full((3,), 2.0))
    factor = 5.0
    assert torch.equal(repeated(torch.full((3,), 3.0))[0], torch.full((3,), 6.0))
    assert torch.equal(repeated(torch.ones(4))[0], torch.full((4,), 5.0))


def test_without_cuda_graphs_all_is_computed_as_it_is():
    def refused(compute: Callable[[], Tensors]) -> Any:
        compute()
        raise RuntimeError("operation not permitted when stream is capturing")

    repeated = Recorded(lambda values: (values + 1,), refused)
    for size in (2, 2, 3):
        assert torch.equal(repeated(torch.ones(size))[0], torch.full((size,), 2.0))


def test_sizes_are_few_and_at_most_a_quarter_too_large():
    sizes = sorted({filled_size(count) for count in range(65)})
    assert sizes == [4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80]
    assert all(filled_size(small) == large for small, large in pairwise(sizes))
    assert all(count < filled_size(count) <= max(4, 1.25 * count + 4) for count in range(200))
