"""Random weights whose outputs are about as large as their inputs, and as natural as they can be.

Replies of the thinker and the talker are legible and end by themselves; spectrogram and waveform have the
size of those of real speech.

Some dimensions of the residual stream are kept free of noise: no layer writes them, only embeddings and
biases do.  After the last norm they still tell what was put there, so that a head's row can read them:

- ``CONSTANT`` is one everywhere: a weight on it is a bias of the head, which the model does not have;
- ``MARK`` says that the end is near: in the thinker after the end of a sentence, in the talker once the
  text is used up and the conditioning rows are those of the pad token.

How readily sentences end is measured: a run over random prompts says which weight gives the odds wanted.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from checkpoint.config import MEL_BINS
from checkpoint.shape import CheckpointShape, SpecialIds

_BIAS = 0.05
_NORM_SPREAD = 0.1


def generator_for(seed: int, part: str) -> torch.Generator:
    """Return a generator of its own for one part, so that no part's shape changes another's weights."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{part}".encode()))


@torch.no_grad()
def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter of ``module`` anew; buffers stay as they are.

    Matrices keep the size of a signal (variance 1 / inputs), embeddings have unit variance, and norms and
    biases are off their neutral values, so that a server that forgets to load one gives other results.
    """
    for layer in module.modules():
        fill_layer(layer, generator)


@torch.no_grad()
def fill_layer(layer: nn.Module, generator: torch.Generator) -> None:
    """Draw the parameters of one layer alone, without those of its children."""
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.normal_(generator=generator)
        if isinstance(layer, nn.Embedding):
            continue
        if name == "weight" and parameter.dim() > 1:
            parameter.div_(math.sqrt(_inputs(layer, parameter)))
        elif name == "weight":
            parameter.mul_(_NORM_SPREAD).add_(1.0)
        elif parameter.dim() == 3 and not isinstance(layer, nn.modules.conv._ConvNd):
            # The matrices of experts, side by side.
            parameter.div_(math.sqrt(parameter.shape[2]))
        else:
            parameter.mul_(_BIAS)


def _inputs(layer: nn.Module, weight: torch.Tensor) -> float:
    """Return how many inputs one output of the layer adds up."""
    if isinstance(layer, nn.ConvTranspose1d):
        return weight.shape[0] * weight.shape[2] / layer.stride[0]
    return weight.numel() / weight.shape[0]


CONSTANT, MARK, TEXT_PAD = -1, -2, -3
_RESERVED = [CONSTANT, MARK, TEXT_PAD]

_TEXT_SHARPNESS = 3.0
_CODEC_SHARPNESS = 2.0
# Sharp attention, so that single rows (the voice's, above all) weigh in and not only their average.
_QUERY_KEY_GAIN = 1.5
_ATTENTION_GAIN = 2.0
_VOICE_GAIN = 3.0
# Logits of unwanted tokens end up this far below zero, give or take the size of the residual stream.
_SUPPRESSION = 30.0
_END_WEIGHT = 70.0

_WORDS_PER_SENTENCE_END = 14
_ENDS_PER_SENTENCE_END = 0.6
_CODES_AFTER_TEXT = 120
# The size of the measuring runs.
_BATCH, _PROMPT, _STEPS = 12, 24, 64


@torch.no_grad()
def fill_thinker(
    thinker: Any, ids: SpecialIds, words: list[int], sentence_ends: list[int], generator: torch.Generator
) -> None:
    """Fill a ``Qwen2_5OmniThinkerForConditionalGeneration``; it will speak in ``words``."""
    fill(thinker, generator)
    _keep_reserved_clean(thinker.model)
    embedding = thinker.model.embed_tokens.weight
    embedding[list(ids.speakers().values())] *= _VOICE_GAIN
    embedding[:, _RESERVED] = 0.0
    embedding[:, CONSTANT] = 1.0
    embedding[sentence_ends, MARK] = 1.0
    embedding[ids.speech_pad, TEXT_PAD] = 1.0
    for encoder_end in (thinker.audio_tower.proj, thinker.visual.merger.mlp[2]):
        encoder_end.weight[_RESERVED] = 0.0
        encoder_end.bias[_RESERVED] = 0.0
        encoder_end.bias[CONSTANT] = 1.0
    _suppress_all_but([*words, *sentence_ends, ids.im_end], thinker.lm_head.weight, _TEXT_SHARPNESS)
    _tune_text_ends(thinker, ids.im_end, words, sentence_ends, generator)


@torch.no_grad()
def fill_talker(talker: Any, codes: int, generator: torch.Generator) -> None:
    """Fill a ``Qwen2_5OmniTalkerForConditionalGeneration``; it will speak in the first ``codes`` ids."""
    fill(talker, generator)
    _keep_reserved_clean(talker.model)
    talker.model.embed_tokens.weight[:, _RESERVED] = 0.0
    projection = talker.thinker_to_talker_proj
    projection.weight[:, _RESERVED] = 0.0
    projection.weight[_RESERVED] = 0.0
    projection.bias[_RESERVED] = 0.0
    projection.weight[MARK, TEXT_PAD] = 1.0
    projection.bias[CONSTANT] = 1.0
    end = talker.config.tts_codec_end_token_id
    _suppress_all_but([*range(codes), end], talker.codec_head.weight, _CODEC_SHARPNESS)
    _set_speech_end(talker, end, codes, generator)


def _keep_reserved_clean(model: Any) -> None:
    for layer in model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight *= _QUERY_KEY_GAIN
        attention.o_proj.weight *= _ATTENTION_GAIN
        for output in (attention.o_proj, layer.mlp.down_proj):
            output.weight[_RESERVED] = 0.0
    model.norm.weight[_RESERVED] = 1.0


def _suppress_all_but(wanted: list[int], head: torch.Tensor, sharpness: float) -> None:
    """Give ``wanted`` rows logits of deviation ``sharpness``, and all others one far below them."""
    kept = head[wanted] * sharpness
    kept[:, _RESERVED] = 0.0
    head.zero_()
    head[:, CONSTANT] = -_SUPPRESSION
    head[wanted] = kept


def _tune_text_ends(
    thinker: Any, end: int, words: list[int], sentence_ends: list[int], generator: torch.Generator
) -> None:
    """Set how often a sentence ends, and how often the reply ends with it, in greedy replies."""
    embedding, head = thinker.model.embed_tokens, thinker.lm_head.weight
    start = torch.tensor(words)[torch.randint(len(words), (_BATCH, _PROMPT), generator=generator)]

    vocabulary = torch.tensor(words)
    hidden = _follow(
        thinker.model, embedding(start), lambda last: embedding(vocabulary[(last @ head[words].T).argmax(-1)])
    )
    lead = (hidden @ head[words].T).amax(-1) - (hidden @ head[sentence_ends].T).amax(-1)
    head[sentence_ends, CONSTANT] += torch.quantile(lead / hidden[:, CONSTANT], 1 / _WORDS_PER_SENTENCE_END)

    spoken = torch.tensor([*words, *sentence_ends])
    start[:, -1] = sentence_ends[0]
    after = thinker.model(inputs_embeds=embedding(start)).last_hidden_state[:, -1]
    lead = (after @ head[spoken].T).amax(-1)
    head[end] = 0.0
    head[end, CONSTANT] = -_SUPPRESSION
    needed = (lead - after @ head[end]) / after[:, MARK]
    head[end, MARK] = torch.quantile(needed, _ENDS_PER_SENTENCE_END)


def _set_speech_end(talker: Any, end: int, codes: int, generator: torch.Generator) -> None:
    """Let speech end after the first of some rare codes that comes once the text is used up.

    Sampling drops all but the likeliest ids, so an end that is merely possible may never come: this one is
    certain after such a code, since pad row and code add up in ``MARK``, and impossible without both.
    """
    rare = torch.rand(codes, generator=generator) < 1 / _CODES_AFTER_TEXT
    talker.model.embed_tokens.weight[:codes, TEXT_PAD] = rare.float()
    row = talker.codec_head.weight[end]
    row.zero_()
    row[CONSTANT] = -1.5 * _END_WEIGHT
    row[MARK] = _END_WEIGHT


def _follow(model: Any, prompt: torch.Tensor, answer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Let ``model`` go on from ``prompt`` ``[batch, n, hidden]``; return its states ``[states, hidden]``.

    ``answer`` makes the next input ``[batch, hidden]`` of the last state, of the same shape.  States as
    they come up in real replies are not spread like those of random inputs, which would mislead.
    """
    output = model(inputs_embeds=prompt, use_cache=True)
    states = []
    for _ in range(_STEPS):
        following = answer(output.last_hidden_state[:, -1]).unsqueeze(1)
        output = model(inputs_embeds=following, past_key_values=output.past_key_values, use_cache=True)
        states.append(output.last_hidden_state[:, -1])
    return torch.cat(states)


def parameters_of(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


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


def make_voices(shape: CheckpointShape, seed: int) -> dict[str, dict[str, Any]]:
    """Return the content of ``spk_dict.pt``, for each voice:

    ``cond`` is float32 ``[1, enc_emb_dim]``, ``ref_mel`` float32 ``[1, reference_frames, 80]``,
    ``bos_token`` the text id that starts this voice's speech.
    """
    speakers = shape.vocabulary.ids.speakers()
    return {name: _voice(shape, token, generator_for(seed, name)) for name, token in speakers.items()}


def _voice(shape: CheckpointShape, bos_token: int, generator: torch.Generator) -> dict[str, Any]:
    frames = torch.randn(1, MEL_BINS, shape.reference_frames + _SMOOTHING_FRAMES - 1, generator=generator)
    smooth = functional.avg_pool1d(frames, _SMOOTHING_FRAMES, stride=1) * _SMOOTHING_FRAMES**0.5
    return {
        "cond": torch.randn(1, shape.dit["enc_emb_dim"], generator=generator),
        "ref_mel": (_MEL_MEAN + _MEL_DEVIATION * smooth).transpose(1, 2).contiguous(),
        "bos_token": bos_token,
    }
