"""Partial answers that clients hold and go on from: what they say is checked like any input.

The stages check what only they know: end tokens, code books, blocks, and what fits into their context.
"""

from collections.abc import Container

from omnirelay.errors import InvalidResumeError
from omnirelay.protocol import PartialAnswer
from omnirelay.status import CodecLimits
from shared.messages import SpeechSettings, ThinkRequest


def samples_of(codec: CodecLimits, frames: int) -> int:
    """Samples of a stream of so many codec frames."""
    return max(0, frames * codec.frame_samples - codec.trimmed_samples)


def check_partial(
    partial: PartialAnswer,
    think: ThinkRequest,
    codec: CodecLimits,
    vocabulary: int,
    placeholders: Container[int],
) -> None:
    """Check a partial answer, in time bounded by what the request may generate, or InvalidResumeError."""
    _require_at_most("text_token_ids", len(partial.text_token_ids), think.sampling.max_tokens)
    for index, token in enumerate(partial.text_token_ids):
        if token >= vocabulary:
            raise InvalidResumeError(
                f"text_token_ids[{index}]: token {token} lies outside the vocabulary of {vocabulary}"
            )
        if token in placeholders:
            problem = f"text_token_ids[{index}]: token {token} is the placeholder of a media item"
            raise InvalidResumeError(problem)
    if partial.text_finish_reason is not None and not partial.text_token_ids:
        raise InvalidResumeError("text_finish_reason: a text that has ended has tokens")
    if think.speech is not None:
        _check_speech(partial, think.speech, codec)
    elif partial.codec_token_ids or partial.codec_finish_reason is not None or partial.chunk_samples:
        raise InvalidResumeError("codec_token_ids, chunk_samples: an answer in text only has no speech")


def _check_speech(partial: PartialAnswer, speech: SpeechSettings, codec: CodecLimits) -> None:
    codes, each = partial.codec_token_ids, codec.frame_samples
    most = speech.sampling.max_tokens
    _require_at_most("codec_token_ids", len(codes), most * codec.groups)
    if len(codes) % codec.groups:
        problem = f"codec_token_ids: {len(codes)} ids are no whole frames of {codec.groups} ids"
        raise InvalidResumeError(problem)
    if not speech.streaming and len(partial.chunk_samples) > 1:
        raise InvalidResumeError("chunk_samples: speech that is not streamed comes in one piece")
    _require_at_most("chunk_samples", len(partial.chunk_samples), most)
    trimmed = codec.trimmed_samples
    for index, samples in enumerate(partial.chunk_samples):
        if not samples or (samples + (0 if index else trimmed)) % each:
            less = f" but for the {trimmed} that the first lacks" if trimmed and not index else ""
            raise InvalidResumeError(
                f"chunk_samples[{index}]: {samples} samples are no whole frames of {each} samples{less}"
            )
    # While codec tokens are missing, their audio may have come before them.
    ended = partial.codec_finish_reason is not None
    frames = -(-sum(partial.chunk_samples) // each)
    bound = len(codes) // codec.groups if ended else most
    if frames > bound:
        raise InvalidResumeError(
            f"chunk_samples: chunks of {frames} frames together, from at most {bound} frames of codec tokens"
        )


def _require_at_most(field: str, length: int, most: int) -> None:
    if length > most:
        raise InvalidResumeError(f"{field}: {length} items, this request has at most {most}")
