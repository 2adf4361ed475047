"""The engine against transformers' Qwen2_5OmniToken2WavModel, for the same weights and noise."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import PoolingParams
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from services.families.qwen2_5_omni.token2wav.carry import StreamPast, past_of
from services.families.qwen2_5_omni.token2wav.synthesis import steps_of
from services.families.qwen2_5_omni.token2wav.vocoder import samples_per_frame
from services.token2wav.chunks import ChunkingConfig
from services.token2wav.stream import AudioStream, VoiceSettings
from services.token2wav.synthesis import CHUNK_KEY, StreamState, unpack_waveform
from tests.token2wav.support import run_all

TOLERANCE = 1e-4


def pair(request, name: str):
    return request.getfixturevalue(name), request.getfixturevalue(name.replace("oracle", "engine"))


def lengths(oracle) -> list[int]:
    block = oracle.block_codes
    return sorted({1, block - 1, block, block + 1, 3 * block + block // 2, 10 * block, 130})


SIZES = [12, 24, 48, 96]


def stream_of(engine, codes, arrival=5, sizes=SIZES, delivered=()):
    """Feed ids a few at a time; return the stream's chunks of audio."""
    stream = AudioStream(
        VoiceSettings(seed=9, speaker="Ethan"), ChunkingConfig(), engine.geometry, sizes, delivered
    )
    parts = []
    codes = list(codes)
    while not stream.finished:
        stream.extend(codes[:arrival])
        codes = codes[arrival:]
        if not codes:
            stream.end()
        while (chunk := stream.next_chunk()) is not None:
            engine.submit_chunk("stream", chunk)
            made = run_all(engine)["stream"]
            if stream.accept_chunk():
                parts.append(made)
            else:
                assert chunk.silent == (made.numel() == 0)
    return parts


@pytest.mark.parametrize("name", ["oracle", "other_oracle"])
def test_offline_waveform_equals_the_reference(request, name):
    oracle, engine = pair(request, name)
    for length in lengths(oracle):
        chunk = oracle.chunk(length, seed=length)
        expected = oracle.waveform(chunk)
        engine.submit_chunk("alone", chunk)
        result = run_all(engine)["alone"]
        assert expected.std() > 0.02
        assert result.shape == expected.shape
        samples = samples_per_frame(oracle.model.config.bigvgan_config)
        assert result.shape[0] == length * oracle.model.config.dit_config.repeats * samples
        assert (result - expected).abs().max() < TOLERANCE, length


@pytest.mark.parametrize("name", ["oracle", "other_oracle"])
def test_settings_of_the_solver_reach_it(request, name):
    oracle, engine = pair(request, name)
    settings: list[dict[str, Any]] = [
        {"guidance_scale": 0.0},
        {"guidance_scale": 2.0},
        {"sway_coefficient": None},
        {"time_points": 2},
        {"time_points": 5},
        {"speaker": "Chelsie"},
    ]
    default = oracle.waveform(oracle.chunk(15))
    for changes in settings:
        chunk = oracle.chunk(15, **changes)
        expected = oracle.waveform(chunk)
        assert (expected - default).abs().max() > 100 * TOLERANCE, changes
        engine.submit_chunk("alone", chunk)
        assert (run_all(engine)["alone"] - expected).abs().max() < TOLERANCE, changes


@pytest.mark.parametrize("name", ["oracle", "other_oracle"])
def test_batched_at_different_steps_equals_the_reference(request, name):
    oracle, engine = pair(request, name)
    changes: list[dict[str, Any]] = [
        {},
        {"guidance_scale": 0.0},
        {"speaker": "Chelsie"},
        {"time_points": 6},
        {},
    ]
    chunks = {
        f"request-{index}": oracle.chunk(length, seed=index, **changes[index])
        for index, length in enumerate([oracle.block_codes + 5, 1, 30, oracle.block_codes, 3])
    }
    results: dict[str, torch.Tensor | None] = {}
    for request_id, chunk in chunks.items():
        engine.submit_chunk(request_id, chunk)
        results |= {outcome.request_id: outcome.waveform for outcome in engine.step()}
    results |= run_all(engine)
    assert results.keys() == chunks.keys()
    for request_id, chunk in chunks.items():
        result = results[request_id]
        assert result is not None
        assert (result - oracle.waveform(chunk)).abs().max() < TOLERANCE, request_id


def test_blocks_before_and_after_matter(oracle):
    """Else the comparisons above would not test the attention between blocks."""
    block = oracle.block_codes
    codes, samples = oracle.codes(4 * block), block * 480
    expected = oracle.waveform(oracle.chunk(4 * block))

    def change_in(changed: tuple[int, ...], heard: int) -> float:
        difference = oracle.waveform(oracle.chunk(4 * block, codes=changed)) - expected
        return difference[heard * samples : (heard + 1) * samples].abs().max().item()

    assert change_in(oracle.codes(block, seed=7) + codes[block:], heard=2) > 50 * TOLERANCE
    assert change_in(codes[: 3 * block] + oracle.codes(block, seed=7), heard=1) > 50 * TOLERANCE


@pytest.mark.parametrize("length", [1, 12, 23])
def test_a_stream_that_fits_in_one_chunk_equals_offline(oracle, engine, length):
    chunk = oracle.chunk(length, seed=9)
    parts = stream_of(engine, chunk.codes)
    assert len(parts) == 1
    assert (parts[0] - oracle.waveform(chunk)).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", [24, 25, 100])
def test_a_stream_has_the_samples_of_offline_and_nearly_their_values(oracle, engine, length):
    chunk = oracle.chunk(length, seed=9)
    expected = oracle.waveform(chunk)
    streamed = torch.cat(stream_of(engine, chunk.codes))
    assert streamed.shape == expected.shape
    correlation = torch.corrcoef(torch.stack([streamed, expected]))[0, 1]
    assert correlation > 0.99


@pytest.mark.parametrize("name", ["oracle", "other_oracle"])
@pytest.mark.parametrize("changes", [{}, {"guidance_scale": 0.0}, {"time_points": 4}])
def test_chunks_that_see_all_that_follows_equal_the_reference(request, name, changes):
    """Only the look-ahead is an approximation: what a chunk takes over from the one before is exact."""
    oracle, engine = pair(request, name)
    block, frames = oracle.block_codes, oracle.model.config.dit_config.block_size
    whole = oracle.chunk(5 * block + 3, seed=9, **changes)
    expected = oracle.waveform(whole)
    neighbour = oracle.chunk(4 * block, seed=5, speaker="Chelsie")
    stream, parts = StreamState(), []
    for start, end in ((0, 1), (1, 4), (4, None)):
        part = replace(
            whole,
            codes=whole.codes[start * block :],
            start=start * frames,
            target_end=whole.target_end if end is None else end * frames,
            stream=stream,
            is_last=end is None,
        )
        engine.submit_chunk("part", part)
        engine.submit_chunk("neighbour", replace(neighbour, stream=StreamState()))
        results = run_all(engine)
        parts.append(results["part"])
        assert (results["neighbour"] - oracle.waveform(neighbour)).abs().max() < TOLERANCE
    assert (torch.cat(parts) - expected).abs().max() < TOLERANCE


def test_the_past_of_a_stream_matters(oracle, engine):
    """Else the test above would not test that it is taken over."""
    frames = oracle.model.config.dit_config.block_size
    whole = oracle.chunk(4 * oracle.block_codes, seed=9)
    stream = StreamState()
    engine.submit_chunk("first", replace(whole, target_end=2 * frames, stream=stream, is_last=False))
    run_all(engine)
    second = replace(
        whole,
        codes=whole.codes[2 * oracle.block_codes :],
        start=2 * frames,
    )
    heard = []
    for state in (stream, StreamState(StreamPast(mel=past_of(stream).mel))):
        engine.submit_chunk("second", replace(second, stream=state))
        heard.append(run_all(engine)["second"])
    assert (heard[0] - heard[1]).abs().max() > 50 * TOLERANCE


@torch.inference_mode()
def test_a_window_has_the_noise_positions_and_conditions_of_the_stream(oracle, synthesizer):
    block, frames = oracle.block_codes, 24
    whole = synthesizer._conditioner.prepare(oracle.chunk(5 * block + 3, seed=9))
    codes = whole.chunk.codes[2 * block :]
    start = 2 * frames
    window = synthesizer._conditioner.prepare(oracle.chunk(len(codes), seed=9, codes=codes, start=start))
    for name in ("mel", "rotation"):
        assert torch.equal(getattr(window, name), getattr(whole, name)[2:]), name
    assert torch.allclose(window.conditioned, whole.conditioned[2:], atol=1e-5)


@torch.inference_mode()
def test_requests_may_take_different_numbers_of_steps_at_once(oracle, pooler):
    """vLLM's scheduler does not do so now; the pooler must not depend on that."""
    chunks = [oracle.chunk(14, seed=1), oracle.chunk(3, seed=2, time_points=6), oracle.chunk(30, seed=3)]
    metadata = PoolingMetadata(
        prompt_lens=torch.tensor([steps_of(chunk) for chunk in chunks]),
        prompt_token_ids=None,
        prompt_token_ids_cpu=None,
        pooling_params=[PoolingParams(task="plugin", extra_kwargs={CHUNK_KEY: chunk}) for chunk in chunks],
        pooling_states=[PoolingStates() for _ in chunks],
    )
    seen = np.zeros(3, dtype=np.int64)
    for taken in ([2, 3, 4], [7, 2, 5]):
        seen += taken
        metadata.build_pooling_cursor(np.array(taken), torch.from_numpy(seen.copy()), torch.device("cpu"))
        outputs = pooler(torch.zeros(sum(taken), 8), metadata)
    for chunk, output in zip(chunks, outputs, strict=True):
        assert (unpack_waveform(output) - oracle.waveform(chunk)).abs().max() < TOLERANCE
    assert pooler.active_states == 0


def test_streams_do_not_depend_on_arrival_and_resume_where_they_were(oracle, engine):
    codes = oracle.codes(100)
    parts = stream_of(engine, codes, arrival=5)
    again = stream_of(engine, codes, arrival=100)
    assert len(parts) == len(again) > 2
    for part, other in zip(parts, again, strict=True):
        assert torch.equal(part, other)
    frames = [part.numel() // 480 for part in parts]
    for delivered in range(len(parts) + 1):
        resumed = stream_of(engine, codes, arrival=30, delivered=frames[:delivered])
        assert len(resumed) == len(parts) - delivered
        for part, other in zip(parts[delivered:], resumed, strict=True):
            assert torch.equal(part, other)


def test_an_empty_stream_ends_at_once(engine):
    assert stream_of(engine, []) == []


@given(data=st.data())
@settings(max_examples=4)
def test_neighbours_change_no_bit_of_a_stream(oracle, engine, data):
    """Whatever streams run beside it, of whatever length, and at whatever step they begin.

    So it is with blocks of 24 frames, as released checkpoints have them.  Libraries have other kernels for
    batches of few rows: with blocks of 9 frames a stream that is alone is rounded otherwise.
    """
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=2, max_size=4))
    waits = data.draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    scales = data.draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=len(lengths), max_size=len(lengths)))

    def begin(number: int) -> AudioStream:
        voice = VoiceSettings(seed=number, speaker="Ethan", guidance_scale=scales[number])
        stream = AudioStream(voice, ChunkingConfig(), engine.geometry, SIZES)
        stream.extend(oracle.codes(lengths[number], seed=number))
        stream.end()
        return stream

    def play(starts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Make streams, each from an engine's step on."""
        streams = {number: begin(number) for number in starts}
        parts: dict[int, list[torch.Tensor]] = {number: [] for number in starts}
        step = 0
        while any(not stream.finished for stream in streams.values()):
            for number, stream in streams.items():
                if step >= starts[number] and (chunk := stream.next_chunk()) is not None:
                    engine.submit_chunk(str(number), chunk)
            step += 1
            for outcome in engine.step() if engine.has_work else ():
                number = int(outcome.request_id)
                assert streams[number].accept_chunk()
                parts[number].append(outcome.waveform)
        return {number: torch.cat(made) for number, made in parts.items()}

    together = play(dict(enumerate(waits)))
    for number in range(len(lengths)):
        assert torch.equal(play({number: 0})[number], together[number])
