"""Turn detection: what a client may set of it, and the turns in a session's input audio."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.fairness.quota import TokenBucket
from gateway.fairness.thread import FairThread
from gateway.http.realtime.audio import BYTES_PER_S, Playback, milliseconds
from gateway.http.realtime.input_buffers import InputAudio
from gateway.http.realtime.items import new_item_id
from gateway.http.voice.echo import SentAnswer
from gateway.http.voice.smart_turn import HEARD_BYTES, EndDetector
from gateway.http.voice.vad import WINDOW_BYTES, WINDOW_MS, VoiceStream, Window
from shared.messages import SAMPLE_RATE

SHORTEST_SPEECH_MS: Final = 1500
"""A turn with less speech may be a hesitation."""
HESITATION: Final = 1.5
"""Factor of the silence that ends such a turn."""
LONGER_THAN_PAUSES: Final = 1.4
"""The silence that ends a turn, as a multiple of its longest pause so far."""
EAGERNESS: Final[Mapping[str, tuple[int, int]]] = {
    "low": (1200, 8000),
    "medium": (700, 4000),
    "auto": (700, 4000),
    "high": (400, 2000),
}
"""Least and most milliseconds of silence that end a turn."""

FINISHED: Final[Mapping[str, float]] = {"low": 0.8, "medium": 0.5, "auto": 0.5, "high": 0.3}
"""How probable it must be that the speaker has finished for a pause to end the turn at once."""


class _Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """What both kinds have.

    Attributes:
        create_response: A turn that has ended is answered.
        interrupt_response: A turn that begins cancels an answer in progress.
    """

    create_response: bool = True
    interrupt_response: bool = True


class ServerVad(_Rules, frozen=True, tag="server_vad"):
    """A turn ends after a silence of a fixed length.

    Attributes:
        threshold: Probability from which 32 ms count as speech.
        prefix_padding_ms: Audio that a turn's recording has before the speech.
        silence_duration_ms: Silence that ends it.
        idle_timeout_ms: Silence after an answer that is answered; null for no limit.
    """

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=0, le=10_000)] = 500
    idle_timeout_ms: Annotated[int, Meta(ge=5000, le=30_000)] | None = None

    def silence_ms(self, speech_ms: int, longest_pause_ms: int, finished: float | None = None) -> float:
        """Return the silence that ends a turn: always the same."""
        del speech_ms, longest_pause_ms, finished
        return self.silence_duration_ms


class SemanticVad(_Rules, frozen=True, tag="semantic_vad"):
    """A turn ends after a silence that depends on how the user speaks, and on whether it sounds finished.

    Attributes:
        eagerness: How soon to take a pause for the end; ``auto`` is ``medium``.
        threshold: As the default of :class:`ServerVad`; clients cannot set it.
        prefix_padding_ms: The same.
        idle_timeout_ms: There is no limit.
    """

    eagerness: Literal["low", "medium", "high", "auto"] = "auto"

    threshold: ClassVar[float] = 0.5
    prefix_padding_ms: ClassVar[int] = 300
    idle_timeout_ms: ClassVar[None] = None

    def silence_ms(self, speech_ms: int, longest_pause_ms: int, finished: float | None = None) -> float:
        """Return the silence that ends a turn with so much speech and such a pause.

        Args:
            finished: How probable it is that the speaker has finished; none if no network has heard it.
        """
        least, most = EAGERNESS[self.eagerness]
        if finished is None:
            wanted = least * (HESITATION if speech_ms < SHORTEST_SPEECH_MS else 1.0)
        else:
            wanted = 0 if finished >= FINISHED[self.eagerness] else most / 2
        if wanted:
            wanted = max(wanted, LONGER_THAN_PAUSES * longest_pause_ms)
        return min(wanted, most)


TurnRules = ServerVad | SemanticVad


HYSTERESIS: Final = 0.15
"""A turn goes on as long as speech is at most so much less probable than its threshold."""
ONSET_WINDOWS: Final = 4
"""Windows of speech that begin a turn."""
INTERRUPTION_WINDOWS: Final = 8
"""Windows of speech that begin a turn while an answer is played: a cough is shorter."""
GAP_WINDOWS: Final = 3
"""So many windows without speech begin the count anew."""
RECENT_WINDOWS: Final = 24
"""Windows of which as many must be speech."""
PAUSE_WINDOWS: Final = 6
"""Windows without speech that may be the end of a turn: so much silence stays at the end of its recording."""

Change = Literal["started", "paused", "resumed", "stopped"]


class TurnTracker:
    """The turns of one stream.

    Attributes:
        rules: When a turn ends; may be replaced at any time.
        speaking: Whether a turn has begun.
        first: The window in which the speech of the turn began, or of what may become one; none if neither.
        count: Windows heard.
    """

    def __init__(self, rules: TurnRules) -> None:
        self.rules = rules
        self.speaking = False
        self.count = 0
        self._recent: deque[Window] = deque(maxlen=RECENT_WINDOWS)
        self._guarded = False
        self._begin = 0
        self._last = 0
        self._speech = 0
        self._longest_pause = 0
        self._finished: float | None = None

    @property
    def end(self) -> int:
        """The window behind the turn, or the last one: a short silence after its speech."""
        return min(self.count, self._last + 1 + PAUSE_WINDOWS)

    @property
    def first(self) -> int | None:
        """See the class."""
        if self.speaking:
            return self._begin
        return next(iter(self._onset()), None)

    def hear(self, window: Window, guarded: bool = False) -> Change | None:
        """Take the next window, and return what changes with it.

        Args:
            guarded: Whether an answer may be heard.
        """
        at = self.count
        self.count += 1
        return self._go_on(at, window) if self.speaking else self._wait(window, guarded)

    def judge(self, finished: float | None) -> Change | None:
        """Take how probable it is that the speaker has finished, for this pause; none if nobody knows."""
        self._finished = finished
        return self._ended(self.count - 1 - self._last)

    def reset(self) -> None:
        """Forget the turn."""
        self.speaking = False
        self._recent.clear()

    def _wait(self, window: Window, guarded: bool) -> Change | None:
        # What was gathered while an answer was heard may be its echo: it takes more of it.
        if self._guarded and not guarded:
            self._recent.clear()
        self._guarded = guarded
        for back, is_echo in enumerate(reversed(window.before), 1):
            # What was an echo already stays one: the delay may have been right then.
            if back <= len(self._recent) and self._recent[-back].is_echo is not True:
                self._recent[-back] = self._recent[-back]._replace(is_echo=is_echo)
        self._recent.append(window)
        needed = INTERRUPTION_WINDOWS if guarded else ONSET_WINDOWS
        voiced = self._onset()[-needed:]
        if len(voiced) < needed:
            return None
        self.speaking = True
        # Windows that were judged again may have become speech after the last of them.
        self._begin, self._last = voiced[0], voiced[-1]
        self._speech, self._longest_pause, self._finished = needed, 0, None
        return "started"

    def _onset(self) -> list[int]:
        """Return the last windows of speech that may become a turn, with at most short gaps between them."""
        voiced, gap = list[int](), 0
        for at, window in zip(range(self.count - 1, -1, -1), reversed(self._recent), strict=False):
            if window.probability >= self.rules.threshold and window.is_echo is False:
                voiced.append(at)
                gap = 0
            elif window.is_echo is not None:
                gap += 1
            if gap >= GAP_WINDOWS or len(voiced) == INTERRUPTION_WINDOWS:
                break
        return voiced[::-1]

    def _go_on(self, at: int, window: Window) -> Change | None:
        pause = at - self._last
        if window.probability >= self.rules.threshold - HYSTERESIS:
            # What is before this window, if anything, was a pause.
            self._longest_pause = max(self._longest_pause, pause - 1)
            self._last = at
            self._speech += 1
            self._finished = None
            return "resumed" if pause > PAUSE_WINDOWS else None
        return self._ended(pause) or ("paused" if pause == PAUSE_WINDOWS else None)

    def _ended(self, pause: int) -> Change | None:
        speech, longest = self._speech * WINDOW_MS, self._longest_pause * WINDOW_MS
        if pause * WINDOW_MS < self.rules.silence_ms(speech, longest, self._finished):
            return None
        self.reset()
        return "stopped"


SLICE_BYTES: Final = 62 * WINDOW_BYTES
"""Most audio that is listened to in one piece, about two seconds, before other sessions have their turn."""
BURST_S: Final = 30.0
"""Audio that a session may send at once; beyond it, it is listened to at :data:`SPEED`."""
SPEED: Final = 4.0
LAST_S: Final = 2.0
"""A turn ends this long before the limit of the buffer."""
_CATCHING_UP: Final = 0.1
"""Seconds, in a second, by which late audio is taken for what comes in time."""
_LATE_S: Final = 0.5
"""Audio that is later was not late on its way: the client had sent none for a while."""
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
        if self._zero is not None and zero < self._zero + _LATE_S:
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
        """The buffer was emptied, but for half a sample: forget the turn."""
        self.tracker.reset()
        self._windows.clear()
        self._read = self._audio.begin
        self._origin = self._read - self.tracker.count * WINDOW_BYTES
        self.item_id = new_item_id()

    async def turns(self) -> AsyncIterator[Turn]:
        """Listen to all that was appended; when a turn has ended, the caller takes it from the buffer."""
        self._clock.arrived(self._audio.end / BYTES_PER_S)
        if self._read < self._audio.begin:
            # A full buffer has forgotten what was not heard, which came before turns were detected.
            self.reset()
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
        # A full buffer may have forgotten all of it.
        end = max(self._audio.begin, self._origin + self.tracker.end * WINDOW_BYTES)
        turn = Turn(change, self.item_id, end)
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
