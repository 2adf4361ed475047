"""The turns in a session's input audio."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Final, NamedTuple

from gateway.fairness.rate_limit import TokenBucket
from gateway.fairness.thread import FairThread
from gateway.http.realtime.input.buffers import InputAudio
from gateway.http.realtime.items import BYTES_PER_S, milliseconds, new_item_id
from gateway.http.realtime.turns.playback import Playback, SentAnswer
from gateway.http.realtime.turns.rules import SemanticVad, TurnRules
from gateway.http.realtime.turns.smart_turn import HEARD_BYTES, EndDetector
from gateway.http.realtime.turns.stream import WINDOW_BYTES, VoiceStream, Window
from gateway.http.realtime.turns.tracker import Change, TurnTracker
from shared.messages import SAMPLE_RATE

SLICE_BYTES: Final = 62 * WINDOW_BYTES
"""Most audio that is listened to in one piece, about two seconds, before other sessions have their turn."""
BURST_S: Final = 30.0
"""Audio that a session may send at once; beyond it, it is listened to at :data:`SPEED`."""
SPEED: Final = 4.0
LAST_S: Final = 2.0
"""A turn ends this long before the limit of the buffer."""
_CATCHING_UP: Final = 0.1
"""Seconds, in a second, by which late audio is taken for what comes in time."""
LEAST_KEPT_MS: Final = 100
"""Silence that stays in the buffer at least."""


class Turn(NamedTuple):
    """A turn that began, paused, was resumed or ended.

    Attributes:
        change: Which of them.
        item_id: The item that it will be.
        position: In the audio, in bytes: where the item begins or, if this is its last pause, ends.
    """

    change: Change
    item_id: str
    position: int

    @property
    def ms(self) -> int:
        """The position in milliseconds."""
        return milliseconds(self.position)


@dataclass(frozen=True)
class VoicePool:
    """The thread that listens for all sessions, so that the event loop never waits for the network.

    Attributes:
        end: Hears in a pause whether the speaker has finished; none if silence alone says so.
    """

    end: EndDetector | None = None
    thread: FairThread = field(default_factory=lambda: FairThread("turns"))


class _Clock:
    """The time at which audio was heard, by the pieces that came soonest: others were late on their way."""

    def __init__(self) -> None:
        self._zero: float | None = None
        self._seen = 0.0

    def arrived(self, end_s: float) -> None:
        """Audio up to a position, in seconds, has come."""
        now = time.monotonic()
        zero = now - end_s
        if self._zero is not None:
            # A client that sent none for a while is not late for ever.
            zero = min(zero, self._zero + _CATCHING_UP * (now - self._seen))
        self._zero, self._seen = zero, now

    def at(self, position_s: float) -> float:
        """Return the monotonic time of a position."""
        return (self._zero or 0.0) + position_s


@dataclass(eq=False)
class TurnListener:
    """Listens to what is appended to a buffer, and keeps only turns in it, with a little before them.

    Attributes:
        tracker: Knows the rules, which may be replaced at any time, and whether a turn has begun.
        item_id: The item that the turn, or the next one, will be.
        _client: Whose turn at the thread it takes.
        _spent: Called with the seconds of a core that listening took.
        _playback: Of the answers, whose echo may be in the audio.
    """

    rules: InitVar[TurnRules]
    _audio: InputAudio
    _pool: VoicePool
    _client: str
    _spent: Callable[[float], None]
    _playback: Playback
    item_id: str = field(default_factory=new_item_id)

    def __post_init__(self, rules: TurnRules) -> None:
        self._clock = _Clock()
        self._pace = TokenBucket(SPEED, BURST_S)
        self._stream = VoiceStream()
        self.tracker = TurnTracker(rules)
        self._read = self._origin = self._audio.begin
        self._windows: deque[Window] = deque()
        self._longest = max(self._audio.limit - int(LAST_S * BYTES_PER_S), self._audio.limit // 2)

    def reset(self) -> None:
        """The buffer was emptied: forget the turn."""
        self.tracker.reset()
        self._windows.clear()
        self._read = self._audio.end
        self._origin = self._read - self.tracker.count * WINDOW_BYTES
        self.item_id = new_item_id()

    async def turns(self) -> AsyncIterator[Turn]:
        """Listen to all that was appended; when a turn has ended, the caller takes it from the buffer."""
        self._clock.arrived(self._audio.end / BYTES_PER_S)
        while True:
            while self._windows:
                turn = self._next()
                if turn is None:
                    continue
                yield turn
                if turn.change == "paused" and (ended := await self._judge(turn)):
                    yield ended
            self._trim()
            if self._audio.end - self._read < WINDOW_BYTES:
                return
            size = min(SLICE_BYTES, self._audio.end - self._read) // WINDOW_BYTES * WINDOW_BYTES
            wait_s = self._pace.wait_s(size / BYTES_PER_S)
            self._pace.take(size / BYTES_PER_S)
            await asyncio.sleep(wait_s)
            listen = partial(self._stream.windows, self._audio.read(self._read, size), *self._playing(size))
            self._read += size
            windows, seconds = await self._pool.thread.timed(self._client, listen)
            self._spent(seconds)
            self._windows.extend(windows)

    def _playing(self, size: int) -> tuple[int, SentAnswer | None, int]:
        """Return the position of the next audio, what may be heard in it of an answer, and its time."""
        first, last = (self._clock.at(each / BYTES_PER_S) for each in (self._read, self._read + size))
        heard = self._playback.is_heard(first)
        return self._read // 2, self._playback.answer(last) if heard else None, round(first * SAMPLE_RATE)

    async def _judge(self, paused: Turn) -> Turn | None:
        """Return the end of the turn, if the speaker sounds as if this pause were it."""
        if self._pool.end is None or not isinstance(self.tracker.rules, SemanticVad):
            return None
        heard = self._origin + self.tracker.count * WINDOW_BYTES
        size = min(heard - self._audio.begin, HEARD_BYTES) // WINDOW_BYTES * WINDOW_BYTES
        pcm = self._audio.read(heard - size, size)
        change = self.tracker.judge(await self._pool.end.finished(pcm, self._client))
        if change is None:
            return None
        self.item_id = new_item_id()
        return paused._replace(change=change)

    def _next(self) -> Turn | None:
        at = self._clock.at((self._origin + (self.tracker.count + 1) * WINDOW_BYTES) / BYTES_PER_S)
        change = self.tracker.hear(self._windows.popleft(), self._playback.is_heard(at))
        heard = self._origin + self.tracker.count * WINDOW_BYTES
        if change is None and self.tracker.speaking and heard - self._audio.begin >= self._longest:
            self.tracker.reset()
            change = "stopped"
        if change == "started":
            begin = self._kept_from()
            self._audio.drop(begin)
            return Turn(change, self.item_id, begin)
        if change is None:
            return None
        turn = Turn(change, self.item_id, self._origin + self.tracker.end * WINDOW_BYTES)
        if change == "stopped":
            self.item_id = new_item_id()
        return turn

    def _trim(self) -> None:
        """Forget silence, once there is half a second of it."""
        if not self.tracker.speaking and (begin := self._kept_from()) - self._audio.begin >= BYTES_PER_S // 2:
            self._audio.drop(begin)

    def _kept_from(self) -> int:
        """Return the position, before speech or else before the end, from which audio is kept."""
        first = self.tracker.count if self.tracker.first is None else self.tracker.first
        kept_ms = max(self.tracker.rules.prefix_padding_ms, 0 if self.tracker.speaking else LEAST_KEPT_MS)
        return max(self._audio.begin, self._origin + first * WINDOW_BYTES - kept_ms * BYTES_PER_S // 1000)
