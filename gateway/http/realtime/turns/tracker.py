"""From windows to turns: when speech has begun, and when a silence has ended it."""

from collections import deque
from typing import Final, Literal

from gateway.http.realtime.turns.rules import TurnRules
from gateway.http.realtime.turns.stream import WINDOW_MS, Window

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
