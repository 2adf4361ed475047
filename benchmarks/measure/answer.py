"""One answer as its client saw it."""

from collections.abc import Iterable

import msgspec

from shared.messages import SAMPLE_RATE


class MeasuredAnswer(msgspec.Struct, kw_only=True):
    """What came, and when; times are seconds on the client's clock, which is ``time.monotonic``.

    Attributes:
        index: Which prompt of the workload it answers.
        sent: When the request was sent.
        first_text: When the first text came.
        pieces: When each piece of audio came, and its samples.
        start_delay_s: How long the server advised to wait with the first piece.
        done: When the answer was complete.
        text_ids: The text's token ids.
        codec_ids: The speech's codec ids.
    """

    index: int
    sent: float
    first_text: float
    pieces: list[tuple[float, int]]
    start_delay_s: float = 0.0
    done: float
    text_ids: list[int]
    codec_ids: list[int]

    @property
    def samples(self) -> int:
        """Length of the waveform."""
        return sum(samples for _, samples in self.pieces)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """An answer's figures.

    Attributes:
        index: Which prompt of the workload it answers.
        ttft_s: Time to first text.
        ttfa_s: Time to first audio.
        completion_s: Time to the end.
        audio_s: Length of the speech.
        real_time_factor: Completion time for each second of speech.
        underruns: Times that a client which plays from the first piece on had nothing to play.
        stalled_s: How long it had nothing to play, all together.
        start_s: From the request until the server advised to play.
        underruns_after_delay: As ``underruns``, of a client that waits so long.
        stalled_after_delay_s: As ``stalled_s``, of such a client.
        text_tokens: Tokens of the text.
        codec_tokens: Tokens of the speech.
    """

    index: int
    ttft_s: float
    ttfa_s: float
    completion_s: float
    audio_s: float
    real_time_factor: float
    underruns: int
    stalled_s: float
    start_s: float = 0.0
    underruns_after_delay: int = 0
    stalled_after_delay_s: float = 0.0
    text_tokens: int
    codec_tokens: int


def timing(answer: MeasuredAnswer) -> Timing:
    """Reduce an answer to its figures."""
    audio_s = answer.samples / SAMPLE_RATE
    completion_s = answer.done - answer.sent
    underruns, stalled_s = play(answer.pieces)
    underruns_after_delay, stalled_after_delay_s = play(answer.pieces, answer.start_delay_s)
    ttfa_s = next(at for at, samples in answer.pieces if samples) - answer.sent
    return Timing(
        index=answer.index,
        ttft_s=answer.first_text - answer.sent,
        ttfa_s=ttfa_s,
        completion_s=completion_s,
        audio_s=audio_s,
        real_time_factor=completion_s / audio_s,
        underruns=underruns,
        stalled_s=stalled_s,
        start_s=ttfa_s + answer.start_delay_s,
        underruns_after_delay=underruns_after_delay,
        stalled_after_delay_s=stalled_after_delay_s,
        text_tokens=len(answer.text_ids),
        codec_tokens=len(answer.codec_ids),
    )


def play(pieces: Iterable[tuple[float, int]], delay_s: float = 0.0) -> tuple[int, float]:
    """Play what has come, from the first piece on.

    Args:
        pieces: When each came, in seconds, and its samples.
        delay_s: How long to wait with the first.

    Returns:
        How often nothing was there to play before the end, for a sample or longer, and for how many seconds.
    """
    heard_until: float | None = None
    underruns, stalled_s = 0, 0.0
    for at, samples in pieces:
        if not samples:
            continue
        if heard_until is None:
            heard_until = at + delay_s
        elif at >= heard_until + 1 / SAMPLE_RATE:
            underruns += 1
            stalled_s += at - heard_until
            heard_until = at
        heard_until += samples / SAMPLE_RATE
    return underruns, stalled_s
