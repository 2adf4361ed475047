"""Streamed code2wav equals transformers' in one piece, however a stream is cut and whoever is beside it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from services.families.qwen3_omni import frame_samples, samples_of, trimmed_samples
from services.families.qwen3_omni.vocoder import Stream, StreamedCode2Wav

TOLERANCE = 1e-9
"""In float64, where rounding does not grow to something that looks like a fault."""
SHAPES: dict[str, dict[str, Any]] = {
    "short window": {"sliding_window": 5, "num_quantizers": 4, "upsample_rates": (4, 3)},
    "released rates": {"num_quantizers": 16, "decoder_dim": 64, "num_key_value_heads": 2},
    "a first frame without sound": {"num_quantizers": 2, "upsampling_ratios": (1,), "upsample_rates": (5, 2)},
}


@cache
def make(shape: str) -> tuple[Qwen3OmniMoeCode2Wav, StreamedCode2Wav]:
    """The reference, and what streams, with the same random weights."""
    small: dict[str, Any] = {
        "codebook_size": 32,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "decoder_dim": 32,
        "layer_scale_initial_scale": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = Qwen3OmniMoeCode2WavConfig(**{**small, **SHAPES[shape]})
    torch.manual_seed(1)
    reference = Qwen3OmniMoeCode2Wav(config).eval().double()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            # Their own initial values make silence.
            if weight.ndim > 1:
                weight.normal_(std=(weight[0].numel()) ** -0.5)
            elif name.endswith((".gamma", ".scale")):
                weight.fill_(0.5)
    streamed = StreamedCode2Wav(config).eval().double()
    streamed.code2wav.load_state_dict(reference.state_dict())
    return reference, streamed


def codes_of(model: Qwen3OmniMoeCode2Wav, frames: int, seed: int) -> torch.Tensor:
    """Codec ids ``[frames, groups]``."""
    generator = torch.Generator().manual_seed(seed)
    size = (frames, model.config.num_quantizers)
    return torch.randint(model.config.codebook_size, size, generator=generator)


def whole(model: Qwen3OmniMoeCode2Wav, codes: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        audio: torch.Tensor = model(codes.T[None])[0, 0]
    return audio


def in_pieces(model: StreamedCode2Wav, codes: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Audio ``[streams, samples]`` of streams that are cut alike."""
    streams, at, audio = [Stream() for _ in codes], 0, []
    with torch.no_grad():
        for size in sizes:
            audio.append(model(streams, torch.stack([each[at : at + size] for each in codes])))
            at += size
    return torch.cat(audio, dim=1)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_no_cut_is_heard(shape: str, sizes: list[int], seed: int) -> None:
    reference, streamed = make(shape)
    codes = codes_of(reference, sum(sizes), seed)
    if not samples_of(reference.config, len(codes)):
        # The reference fails where there is nothing to hear.
        assert in_pieces(streamed, [codes], sizes).shape == (1, 0)
        return
    expected = whole(reference, codes)
    assert expected.abs().max() > 0.05, "silence is no test"
    assert len(expected) == samples_of(reference.config, len(codes))
    torch.testing.assert_close(in_pieces(streamed, [codes], sizes)[0], expected, atol=TOLERANCE, rtol=0)


def test_a_released_streams_frames_last_80_ms_each_but_the_first() -> None:
    config = Qwen3OmniMoeCode2WavConfig()
    assert (frame_samples(config), trimmed_samples(config)) == (1920, 555)
    assert [samples_of(config, frames) for frames in (1, 2, 300)] == [1365, 3285, 300 * 1920 - 555]


def test_streams_of_different_lengths_go_on_together() -> None:
    reference, streamed = make("short window")
    ahead, behind = codes_of(reference, 13, seed=1), codes_of(reference, 5, seed=2)
    streams = [Stream(), Stream()]
    with torch.no_grad():
        begun = [streamed(streams[:1], ahead[None, :9])[0], streamed(streams[1:], behind[None, :1])[0]]
        rest = streamed(streams, torch.stack([ahead[9:], behind[1:]]))
    for codes, first, last in zip((ahead, behind), begun, rest, strict=True):
        torch.testing.assert_close(torch.cat([first, last]), whole(reference, codes), atol=TOLERANCE, rtol=0)


def test_a_stream_keeps_no_more_the_longer_it_is() -> None:
    reference, streamed = make("short window")
    stream, sizes = Stream(), []
    with torch.no_grad():
        for seed in range(4):
            streamed([stream], codes_of(reference, 7, seed)[None])
            sizes.append(sum(each.untyped_storage().nbytes() for each in stream.kept))
    assert stream.frames == 28
    assert len(set(sizes)) == 1
