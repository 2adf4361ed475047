"""Weights of the thinker and the talker: random, but replies are legible and end by themselves.

Some dimensions of the residual stream are kept free of noise: no layer writes them, only embeddings and
biases do.  After the last norm they still tell what was put there, so that a head's row can read them:

- ``CONSTANT`` is one everywhere: a weight on it is a bias of the head, which the model does not have;
- ``MARK`` says that the end is near: in the thinker after the end of a sentence, in the talker once the
  text is used up and the conditioning rows are those of the pad token.

How strongly the ends react is measured: a run over random inputs says which weight gives the odds wanted.
"""

from typing import Any

import torch
from torch import nn

from checkpoint.initialize import fill
from checkpoint.shape import SpecialIds

CONSTANT, MARK, TEXT_PAD = -1, -2, -3
_RESERVED = [CONSTANT, MARK, TEXT_PAD]

_TEXT_SHARPNESS = 3.0
_CODEC_SHARPNESS = 3.0
# Sharp attention, so that single rows (the voice's, above all) weigh in and not only their average.
_QUERY_KEY_GAIN = 1.5
_ATTENTION_GAIN = 2.0
_VOICE_GAIN = 3.0
_PAD_GAIN = 2.0
# Logits of unwanted tokens end up this far below zero, give or take the size of the residual stream.
_SUPPRESSION = 30.0

_WORDS_PER_SENTENCE_END = 14
_ENDS_PER_SENTENCE_END = 0.6
_CODES_AFTER_TEXT = 130

# transformers' defaults for the talker, under which its speech should end.
_TEMPERATURE, _TOP_K, _TOP_P = 0.9, 40, 0.8


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
    embedding[ids.speech_pad, TEXT_PAD] = _PAD_GAIN
    for encoder_end in (thinker.audio_tower.proj, thinker.visual.merger.mlp[2]):
        encoder_end.weight[_RESERVED] = 0.0
        encoder_end.bias[_RESERVED] = 0.0
        encoder_end.bias[CONSTANT] = 1.0
    _suppress_all_but([*words, *sentence_ends, ids.im_end], thinker.lm_head.weight, _TEXT_SHARPNESS)
    _tune_text_ends(thinker, ids.im_end, words, sentence_ends, generator)


@torch.no_grad()
def fill_talker(talker: Any, codes: int, pad_row: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a ``Qwen2_5OmniTalkerForConditionalGeneration``; it will speak in the first ``codes`` ids.

    ``pad_row`` is the thinker's embedding of the text pad token, ``[embedding_size]``.
    """
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
    _tune_speech_end(talker, end, codes, pad_row, generator)


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
    """Set how often a sentence ends, and how often the reply ends with it."""
    shape = (16, 96)
    ids = torch.tensor(words)[torch.randint(len(words), shape, generator=generator)]
    stops = torch.tensor(sentence_ends)[torch.randint(len(sentence_ends), shape, generator=generator)]
    ids = torch.where(torch.rand(shape, generator=generator) < 0.1, stops, ids)
    hidden = thinker.model(inputs_embeds=thinker.model.embed_tokens(ids)).last_hidden_state.flatten(0, 1)
    head = thinker.lm_head.weight

    lead = (hidden @ head[words].T).amax(-1) - (hidden @ head[sentence_ends].T).amax(-1)
    head[sentence_ends, CONSTANT] += torch.quantile(lead / hidden[:, CONSTANT], 1 / _WORDS_PER_SENTENCE_END)

    after = hidden[hidden[:, MARK] > 0]
    head[end, CONSTANT] = -_SUPPRESSION
    lead = (after @ head[[*words, *sentence_ends]].T).amax(-1) - after @ head[end]
    head[end, MARK] = torch.quantile(lead / after[:, MARK], _ENDS_PER_SENTENCE_END)


def _tune_speech_end(
    talker: Any, end: int, codes: int, pad_row: torch.Tensor, generator: torch.Generator
) -> None:
    """Set how likely speech ends at a step once the text is used up, when sampled at the defaults."""
    batch, text, speech = 4, 32, 96
    rows = torch.randn(batch, text, len(pad_row), generator=generator)
    rows = torch.cat([rows, pad_row.expand(batch, speech, -1)], dim=1)
    ids = torch.randint(codes, (batch, text + speech), generator=generator)
    inputs = talker.thinker_to_talker_proj(rows + talker.model.embed_tokens(ids))
    hidden = talker.model(inputs_embeds=inputs).last_hidden_state[:, text:].flatten(0, 1)
    head = talker.codec_head.weight
    head[end, CONSTANT] = -_SUPPRESSION
    low, high = 0.0, 50 * _SUPPRESSION
    for _ in range(20):
        head[end, MARK] = (low + high) / 2
        if _sampled_share(hidden @ head.T, end) < 1 / _CODES_AFTER_TEXT:
            low = (low + high) / 2
        else:
            high = (low + high) / 2


def _sampled_share(logits: torch.Tensor, token: int) -> float:
    """Return the mean probability of ``token`` under the talker's sampling; ``logits`` is ``[n, ids]``."""
    best, ids = (logits / _TEMPERATURE).topk(_TOP_K)
    chances = best.softmax(-1)
    chances = torch.where(chances.cumsum(-1) - chances < _TOP_P, chances, 0.0)
    chances = chances / chances.sum(-1, keepdim=True)
    return float(torch.where(ids == token, chances, 0.0).sum(-1).mean())


def parameters_of(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
