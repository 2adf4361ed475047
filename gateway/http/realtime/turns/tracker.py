"""From windows to turns: when speech has begun, and when a silence has ended it."""

from collections import deque
from typing import Final, Literal

from gateway.http.realtime.turns.rules import TurnRules
from gateway.http.realtime.turns.stream import WINDOW_MS, Window

HYSTERESIS: Final = 0.15
"""A turn goes on as long as speech is at most so much less probable than its threshold."""
ONSET_WINDOWS: Final = 4
"""Windows of speech that begin a turn."""
INTERRUPTION_WINDOWS: Final = 9
"""Windows of speech that begin a turn while an answer is played: a cough is shorter."""
GAP_WINDOWS: Final = 3
"""More windows without speech than this begin the count anew."""
PAUSE_WINDOWS: Final = 6
"""Windows without speech that may be the end of a turn: so much silence stays at the end of its recording."""
ECHO: Final = 10**-1.2
"""Speech with less than this part of the answer's power (-12 dB) is taken for its echo while it is played."""

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
        self._onset: deque[tuple[int, float]] = deque(maxlen=INTERRUPTION_WINDOWS)
        self._begin = 0
        self._last = 0
        self._speech = 0
        self._longest_pause = 0

    @property
    def end(self) -> int:
        """The window behind the turn, or the last one: a short silence after its speech."""
        return min(self.count, self._last + 1 + PAUSE_WINDOWS)

    @property
    def first(self) -> int | None:
        """See the class."""
        if self.speaking:
            return self._begin
        return self._onset[0][0] if self._onset else None

    def hear(self, window: Window, answer_power: float = 0.0) -> Change | None:
        """Take the next window, and return what changes with it.

        Args:
            answer_power: Mean square of the answer that is being played; 0 if none is.
        """
        at = self.count
        self.count += 1
        return self._go_on(at, window) if self.speaking else self._wait(at, window, answer_power)

    def reset(self) -> None:
        """Forget the turn."""
        self.speaking = False
        self._onset.clear()

    def _wait(self, at: int, window: Window, answer_power: float) -> Change | None:
        if self._onset and at - self._onset[-1][0] > GAP_WINDOWS:
            self._onset.clear()
        if window.probability < self.rules.threshold:
            return None
        self._onset.append((at, window.power))
        needed = INTERRUPTION_WINDOWS if answer_power else ONSET_WINDOWS
        voiced = list(self._onset)[-needed:]
        if len(voiced) < needed or sum(power for _, power in voiced) / needed < ECHO * answer_power:
            return None
        self.speaking = True
        self._begin, self._last = voiced[0][0], at
        self._speech, self._longest_pause = needed, 0
        return "started"

    def _go_on(self, at: int, window: Window) -> Change | None:
        pause = at - self._last
        if window.probability >= self.rules.threshold - HYSTERESIS:
            # What is before this window, if anything, was a pause.
            self._longest_pause = max(self._longest_pause, pause - 1)
            self._last = at
            self._speech += 1
            return "resumed" if pause > PAUSE_WINDOWS else None
        silence = self.rules.silence_ms(self._speech * WINDOW_MS, self._longest_pause * WINDOW_MS)
        if pause * WINDOW_MS < silence:
            return "paused" if pause == PAUSE_WINDOWS else None
        self.reset()
        return "stopped"
