"""Takes the echo of an answer out of what a microphone hears, by the answer's own samples.

The delay is where the microphone and the answer correlate best.  The path from loudspeaker to microphone is
a filter: the one that explains the last moment with the least error, if its taps are as large as those of a
room.  A few steps of conjugate gradients a tenth of a second find it, each beginning where the one before
ended.  A filter that was right and does not fit any more is suspect: until another delay fits, nobody knows
whether windows are echo, and then they are judged again.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.http.voice.resampling import (
    BLOCK,
    DECIMATION,
    FACTOR,
    INTERPOLATION,
    MARGIN,
    Floats,
    Resampler,
    resampled,
)
from gateway.http.voice.residual import WINDOW, ResidualEcho
from shared.messages import SAMPLE_RATE

EARLIEST_S: Final = 0.1
"""Clocks and networks may make it seem that an answer is heard so much before it could be played."""
Spectrum = NDArray[np.complexfloating]
WINDOW_IN: Final = FACTOR * WINDOW
RECENT: Final = 6
"""Windows in which the delay is looked for."""
HISTORY: Final = 12
"""Windows that the filter explains."""
ROOM: Final = 4
"""Windows for which a room reverberates: the length of the filter."""
STEP: Final = 3
"""Windows after which delay and filter are found again."""
_RECENT: Final = RECENT * WINDOW
_TAPS: Final = ROOM * WINDOW
_SIZE: Final = (HISTORY + ROOM) * WINDOW
_BEFORE: Final = 16
"""Taps before the loudest: the delay is not exact."""
_LIKELY: Final = 8.0
_SURE: Final = 14.0
"""Correlation at a delay that is certain, or else is found twice, over its root mean square at all delays."""
_TRACKED: Final = np.float32(0.1)
"""Part of the last moment that the filter leaves, if the delay is right."""
_LEFT: Final = 0.5
_BETTER: Final = 0.7
"""Parts that another delay must leave to be the better one: with the filter that was right, or any."""


def _prior() -> Floats:
    """Return how large each tap may be: the direct way, then reverberation that fades."""
    time = np.arange(_TAPS) - _BEFORE
    late = np.where(time > -4, 0.06 * np.exp(-np.maximum(time, 0) / 500), 0)
    return np.asarray(0.5 * np.exp(-np.abs(time) / 8) + late + 1e-6, np.float32)


_PRIOR: Final = _prior()
_NONE: Final = np.zeros(_TAPS, np.float32)
_SMOOTH: Final = np.asarray([0.25, 0.5, 0.25], np.float32)
_LINES: Final = 32
"""Lines of a spectrum that are whitened alike."""
_FLAT: Final = 1e-2
"""Part of the mean power below which lines are not made louder."""
_QUIET: Final = np.float32(0.1)
"""Part of the loudest below which the answer is too quiet to compare."""
_SILENT: Final = 1e-3
"""Level of an answer that can have no echo."""
_FITS: Final = 0.3
"""Part of its own power by which what the filter makes of the answer lessens what is heard, at least, if both
the delay and the filter are right."""
_CHANCE: Final = 0.35
"""So much of the mean of both levels a user and the echo have in common, by chance."""
_FITS_WELL: Final = 0.5
"""The same where the delay has just been found."""
_PART: Final = 0.05
"""Part of what is heard above which that can be said."""
_ALIKE: Final = 0.5
"""Correlation, about, above which it can be said of a quieter echo, too."""
_FOUND: Final = 5
"""Steps in which nothing is the user's: the delay has just been found."""
_MOVED: Final = 2
"""The same after it has changed."""
_TIMES: Final = 3
"""Times that a delay is found, at least, before a filter that was right is given up for it."""
_OFTEN: Final = 20
"""Steps each of which adapts the filter; later ones do so seldom."""
_SELDOM: Final = 3


class SentAnswer(NamedTuple):
    """What may be heard of answers.

    Attributes:
        latest_s: An echo is heard at most so long after it could be played first.
        pieces: Time at which each is played if it is played as it comes, in samples, and the samples.
    """

    latest_s: float
    pieces: tuple[tuple[int, bytes], ...]

    def samples(self, first: int, count: int) -> Floats:
        """Return samples, from -1 to 1, from a time in samples; silence where there are none."""
        found = np.zeros(count, np.float32)
        for start, pcm in self.pieces:
            begin, end = max(start, first), min(start + len(pcm) // 2, first + count)
            if begin < end:
                found[begin - first : end - first] = np.frombuffer(pcm, "<i2")[begin - start : end - start]
        return found / np.float32(32768)


class Verdict(NamedTuple):
    """What is known of a window.

    Attributes:
        is_echo: Whether an answer explains it; none if that is not known yet.
        before: The same of the windows before it, if they were judged again.
    """

    is_echo: bool | None = False
    before: Sequence[bool] = ()


class EchoCanceller:
    """The filter of a session: what it hears, what was played, and what lies between."""

    def __init__(self) -> None:
        self._zero = 0
        self._at = 0
        self._lag: int | None = None
        self._since = 0
        self._input = Resampler(DECIMATION)
        self._output = Resampler(INTERPOLATION)
        self._heard = np.zeros(HISTORY * WINDOW, np.float32)
        self._played = np.zeros(_SIZE, np.float32)
        self._filter = self._tried = _NONE
        self._spectrum = np.zeros(_SIZE // 2 + 1, np.complex64)
        self._response = self._spectrum
        self._left = self._heard
        self._residual = ResidualEcho()
        self._again = False
        self._times = 0
        self._rounds = self._unsure = self._suspect = 0
        self._seen = -SAMPLE_RATE

    def cancel(
        self, samples: Floats, position: int, answer: SentAnswer, at: int
    ) -> tuple[Floats, list[Verdict]]:
        """Return what is left of whole windows, and which of them are explained by the answer.

        Args:
            position: Of the first sample in the stream.
            at: Its time, in samples; a jitter of it does no harm.
        """
        moved = at - position - self._zero
        if abs(moved) > EARLIEST_S * SAMPLE_RATE:
            self._zero += moved
            if self._lag is not None:
                self._lag += moved
        self._at = self._zero + position
        left, verdicts = [], list[Verdict]()
        for begin in range(0, samples.size, 4 * WINDOW_IN):
            piece = samples[begin : begin + 4 * WINDOW_IN]
            count = piece.size // WINDOW_IN
            self._hear(piece, answer)
            self._since += count
            if self._since >= STEP:
                self._since = 0
                self._track(answer)
            left.append(self._left[-count * WINDOW :])
            before = self._explained_again(count) if self._again else []
            verdicts += [
                Verdict(each, before if not at else []) for at, each in enumerate(self._explained(count))
            ]
        return self._output.push(np.concatenate(left)), verdicts

    def _hear(self, samples: Floats, answer: SentAnswer) -> None:
        heard = self._input.push(samples)
        self._heard = np.concatenate([self._heard[heard.size :], heard])
        self._at += samples.size
        played = np.concatenate([self._played[heard.size :], self._aligned(answer, heard.size)])
        self._use(self._lag, played, self._filter)

    def _use(self, lag: int | None, played: Floats, taps: Floats) -> None:
        """Explain what was heard by a delay, what is played with it, and a filter."""
        if taps is not self._filter:
            self._response = np.asarray(np.fft.rfft(taps, _SIZE), np.complex64)
        if played is not self._played:
            self._spectrum = np.asarray(np.fft.rfft(played), np.complex64)
        self._lag, self._played, self._filter = lag, played, taps
        self._left = self._heard
        if lag is not None:
            self._left = self._heard - _signal(self._spectrum * self._response)[_TAPS:]

    def _aligned(self, answer: SentAnswer, count: int) -> Floats:
        """Return the last samples that are played, by the delay that was found."""
        if self._lag is None:
            return np.zeros(count, np.float32)
        return self._at_lag(answer, self._lag - FACTOR * _BEFORE, count)

    def _at_lag(self, answer: SentAnswer, lag: int, count: int) -> Floats:
        size = FACTOR * count
        return resampled(answer.samples(self._at - lag - size - MARGIN, size + MARGIN), DECIMATION)

    def _track(self, answer: SentAnswer) -> None:
        """Find the delay, if it is not right any more, and the filter."""
        power, left, fits = self._fit(_FITS_WELL if self._suspect else _FITS)
        self._unsure -= 1
        if not self._tried.any() and self._rounds > _FOUND and left > _LEFT * power:
            self._rounds = 0
            self._use(None, self._played, _NONE)
        if left < _TRACKED * power:
            if not self._tried.any():
                self._residual.fits()
            self._tried = self._filter
            if self._unsure <= _MOVED:
                self._unsure = 0
        if self._lag is not None and fits:
            # The delay that was found fits still, or the one before does again.
            self._suspect, self._again = 0, self._again or self._suspect > 0
        else:
            if self._suspect or (fits is False and self._tried.any()):
                self._suspect += 1
            if self._suspect > _FOUND and fits is None:
                self._suspect = 0
            self._look_elsewhere(answer, left)
        if self._lag is None or 0 < self._suspect <= _FOUND or np.abs(self._played).max() < _SILENT:
            return
        self._rounds += 1
        often = self._rounds < _OFTEN or not self._rounds % _SELDOM
        if often and (self._rounds <= _FOUND or self._fit()[2] is not None):
            self._adapt()
            self._residual.learn(*self._rest())

    def _fit(self, least: float = _FITS) -> tuple[float, float, bool | None]:
        """Return the power of the last moment, what is left of it, and whether the filter fits.

        If it does, power lessens by that of the echo, but for what a user and it have in common by chance.
        None if the echo is too quiet to say.
        """
        heard, rest = self._heard[-_RECENT:], self._left[-_RECENT:]
        power, left, echo = _power(heard), _power(rest), _power(heard - rest)
        # An echo that has grown is much louder than the filter makes it, and still alike.
        if echo <= _PART * power and power - left <= _ALIKE * np.sqrt(power * echo):
            return power, left, None
        least = max(least, 1 - _CHANCE * float(np.sqrt(left / (echo + 1e-12))))
        return power, left, bool(left < _TRACKED * power or power - left > least * echo)

    def _look_elsewhere(self, answer: SentAnswer, left: float) -> None:
        """Find the delay: that of the last moment alone, if a piece came late, or it was never right."""
        lag, sure = self._located(answer)
        before = self._lag, self._played, self._filter
        # The loudest tap of a filter may be another than the one that the delay was once found for.
        loudest = FACTOR * (int(np.abs(self._tried).argmax()) - _BEFORE) if self._tried.any() else 0
        same = before[0] is not None and lag is not None and abs(lag - loudest - before[0]) <= 2 * FACTOR
        if lag is None or (same and not self._suspect):
            return
        taps = _NONE
        if before[0] is not None:
            if self._tried.any():
                if self._refined(answer, lag - loudest) < left and self._fit(_FITS_WELL)[2]:
                    self._rounds = min(self._rounds, _OFTEN // 2)
                    self._residual.moved()
                    self._suspect = 1
                    return
                self._use(*before)
                sure = not same and self._times >= _TIMES
            shift = (before[0] - lag) // FACTOR
            taps = np.pad(before[2], (max(0, shift), max(0, -shift)))[max(0, -shift) :][:_TAPS]
        if not sure:
            return
        self._use(lag, self._at_lag(answer, lag - FACTOR * _BEFORE, _SIZE), taps)
        self._adapt()
        if self._fit()[1] > _BETTER * left:
            self._use(*before)
            return
        self._unsure = _FOUND if before[0] is None else _MOVED
        self._rounds = self._suspect = 0

    def _refined(self, answer: SentAnswer, lag: int) -> float:
        """Move the delay by single samples, and return the power that is left of the last moment."""
        found, kept = [], self._played[:-_RECENT]
        for at in range(lag - 2 * FACTOR, lag + 2 * FACTOR + 1):
            played = np.concatenate([kept, self._at_lag(answer, at - FACTOR * _BEFORE, _RECENT)])
            self._use(at, played, self._tried)
            found.append((self._fit()[1], at, played))
        left, at, played = min(found, key=itemgetter(0))
        self._use(at, played, self._tried)
        return left

    def _located(self, answer: SentAnswer) -> tuple[int | None, bool]:
        """Return the likely delay, in samples of the answer, and whether it is certain."""
        first = -int(EARLIEST_S * SAMPLE_RATE / FACTOR) // BLOCK * BLOCK
        count = int(answer.latest_s * SAMPLE_RATE / FACTOR) // BLOCK * BLOCK - first
        played = self._at_lag(answer, FACTOR * first, count + _RECENT)
        if not (played.any() and self._heard[-_RECENT:].any()):
            return None, False
        size = _fast(played.size)
        heard, sent = np.fft.rfft(self._heard[-_RECENT:], size), np.fft.rfft(played, size)
        heard, sent = heard * _whitening(np.abs(heard) ** 2), sent * _whitening(np.abs(sent) ** 2)
        # The longest delay comes first.
        fit = _signal(heard * np.conj(sent), size)[-np.arange(count) % size]
        sums = np.cumsum(_signal(sent, size) ** 2)
        power = sums[_RECENT : _RECENT + count] - sums[:count]
        fit = np.where(power > _QUIET * power.max(), fit / np.sqrt(power + 1e-20), 0)
        best = int(fit.argmax())
        certainty = fit[best] / np.sqrt(_power(fit) / (np.count_nonzero(fit) + 1) + 1e-20)
        if not 0 < best < count - 1 or certainty < _LIKELY:
            return None, False
        before, peak, after = fit[best - 1 : best + 2]
        between = (before - after) / (2 * (before - 2 * peak + after) - 1e-12)
        lag = round(FACTOR * (first + count - best - between))
        seen, self._seen = self._seen, lag
        self._times = self._times + 1 if abs(lag - seen) <= 2 * FACTOR else 1
        return lag, bool(certainty > _SURE or self._times > 1)

    def _adapt(self) -> None:
        """Bring the filter nearer to the one that explains what was heard with the least error.

        Windows that it leaves much of count less: a user may speak in them.
        """
        whitening = _whitening(np.abs(self._spectrum) ** 2)
        heard = _signal(np.fft.rfft(np.concatenate([_NONE, self._heard])) * whitening)[_TAPS:]
        played = self._spectrum * whitening
        back = np.conj(played)

        def forward(scaled: Floats) -> Floats:
            return _signal(played * np.fft.rfft(_PRIOR * scaled, _SIZE))[_TAPS:]

        def backward(left: Floats) -> Floats:
            return _PRIOR * _signal(back * np.fft.rfft(np.concatenate([_NONE, left])))[:_TAPS]

        scaled = self._filter / _PRIOR
        left = heard - forward(scaled)
        power = np.mean(left.reshape(-1, WINDOW // 2) ** 2, axis=1)
        power = np.convolve(np.pad(power, 1, mode="edge"), _SMOOTH, "valid")
        weights = np.repeat(1 / (power + 1e-3 * power.max() + 1e-10), WINDOW // 2)
        scale = 1 / (1 + _PRIOR**2 * np.mean(weights) * 2 * np.mean(np.abs(played) ** 2))
        gradient = backward(weights * left) - scaled
        direction = scale * gradient
        slope = gradient @ direction
        for last in (False, True):
            change = forward(direction)
            step = slope / (change @ (weights * change) + direction @ direction + 1e-20)
            scaled = scaled + step * direction
            if last:
                break
            left = left - step * change
            gradient = backward(weights * left) - scaled
            before, slope = slope, gradient @ (scale * gradient)
            direction = scale * gradient + slope / (before + 1e-20) * direction
        self._use(self._lag, self._played, _PRIOR * scaled)

    def _explained(self, windows: int) -> list[bool | None]:
        """Return which of the last windows an echo and noise explain; none if that is not known."""
        if self._lag is None:
            return [False] * windows
        if self._unsure > 0:
            self._residual.ignored()
            return [True] * windows
        return self._residual.explains(*self._rest(windows + 1), self._suspect == 0)

    def _explained_again(self, windows: int) -> list[bool]:
        """Return which of the windows before the last an echo explains, now that the delay is found."""
        self._again = False
        left, echo = self._rest()
        return self._residual.explains_now(left[: -windows * WINDOW], echo[: -windows * WINDOW])

    def _rest(self, windows: int = HISTORY) -> tuple[Floats, Floats]:
        """Return what is left of the last windows, and the echo in them."""
        left = self._left[-windows * WINDOW :]
        return left, self._heard[-left.size :] - left


def _signal(spectrum: Spectrum, size: int = _SIZE) -> Floats:
    return np.asarray(np.fft.irfft(spectrum, size), np.float32)


def _whitening(power: Floats) -> Floats:
    """Return the factors that make a spectrum flat, but for its finest lines."""
    groups = power[: len(power) // _LINES * _LINES].reshape(-1, _LINES).mean(axis=1)
    smooth = np.interp(np.arange(len(power)), _LINES * np.arange(len(groups)) + _LINES / 2, groups)
    return np.asarray(1 / np.sqrt(smooth + _FLAT * smooth.mean() + 1e-9), np.float32)


def _power(samples: Floats) -> float:
    return float(samples @ samples)


def _fast(size: int) -> int:
    """Return a size not below this one, of which a Fourier transform is fast."""
    return min(m << max(0, -(-size // m) - 1).bit_length() for m in (9, 15, 1))
