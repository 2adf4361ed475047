"""Weights of token2wav, and the voices: spectrogram and waveform have the size of those of real speech."""

from typing import Any

import torch
from torch.nn import functional

from checkpoint.config import MEL_BINS
from checkpoint.initialize import fill
from checkpoint.shape import CheckpointShape

# Logarithmic mel values of speech lie about here.
_MEL_MEAN, _MEL_DEVIATION = -4.0, 1.5
_CODE_GAIN = 2.0
_MODULATION_GAIN = 3.0
_VELOCITY_GAIN = 2.5
_LOUDNESS = 0.1
_MEASURED_CODES = 96
_SMOOTHING_FRAMES = 9


@torch.no_grad()
def fill_token2wav(token2wav: Any, voice: dict[str, Any], generator: torch.Generator) -> None:
    """Fill a ``Qwen2_5OmniToken2WavModel`` so that ``voice`` speaks at an RMS of about 0.1."""
    fill(token2wav, generator)
    dit, vocoder = token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model
    # The codes must count for more than the noise that the solver starts from.
    dit.text_embed.codec_embed.weight *= _CODE_GAIN
    for modulation in (*(block.attn_norm for block in dit.transformer_blocks), dit.norm_out):
        modulation.linear.weight *= _MODULATION_GAIN
    dit.proj_out.weight *= _VELOCITY_GAIN
    dit.proj_out.bias += _MEL_MEAN
    # A kernel that adds up to zero lets no constant offset through.
    vocoder.conv_post.weight -= vocoder.conv_post.weight.mean(-1, keepdim=True)
    _set_loudness(token2wav, voice, generator)


def _set_loudness(token2wav: Any, voice: dict[str, Any], generator: torch.Generator) -> None:
    """Scale the vocoder's last convolution, which is linear, by one measured run."""
    last = token2wav.code2wav_bigvgan_model.conv_post.weight
    codes = token2wav.code2wav_dit_model.config.num_embeds
    # Quiet enough for the measured run not to be clipped.
    last *= 1e-3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        wave = token2wav(
            torch.randint(codes, (1, _MEASURED_CODES), generator=generator),
            conditioning=voice["cond"],
            reference_mel=voice["ref_mel"],
        )
    last *= _LOUDNESS / wave.square().mean().sqrt()


def make_voice(shape: CheckpointShape, bos_token: int, generator: torch.Generator) -> dict[str, Any]:
    """Return one entry of ``spk_dict.pt``.

    ``cond`` is float32 ``[1, enc_emb_dim]``, ``ref_mel`` float32 ``[1, reference_frames, 80]``,
    ``bos_token`` the text id that starts this voice's speech.
    """
    frames = torch.randn(1, MEL_BINS, shape.reference_frames + _SMOOTHING_FRAMES - 1, generator=generator)
    smooth = functional.avg_pool1d(frames, _SMOOTHING_FRAMES, stride=1) * _SMOOTHING_FRAMES**0.5
    return {
        "cond": torch.randn(1, shape.dit["enc_emb_dim"], generator=generator),
        "ref_mel": (_MEL_MEAN + _MEL_DEVIATION * smooth).transpose(1, 2).contiguous(),
        "bos_token": bos_token,
    }
