"""The playback clock: when each listener needs the next piece of speech.

Work for streams far ahead of their listeners can wait for the others (LiveServe, arXiv 2606.22983; VoxServe,
arXiv 2602.00269).
"""

import time
from collections.abc import Mapping

PATIENCE_S = 5.0
"""An answer that is not streamed is due this long after its request."""


class PlaybackClock:
    """When one listener will have heard everything generated so far.

    Args:
        streaming: The listener plays while it is generated.

    Attributes:
        due: That time, of ``time.monotonic``; a stream without any speech is due at once.
    """

    def __init__(self, streaming: bool) -> None:
        self._streaming = streaming
        self.due = time.monotonic() + (0.0 if streaming else PATIENCE_S)

    def made(self, seconds: float) -> None:
        """Add generated speech; a listener that ran dry continues now."""
        if self._streaming:
            self.due = max(self.due, time.monotonic()) + seconds


def has_slack(due: Mapping[str, float], margin_s: float) -> set[str]:
    """The streams that should wait because they are far ahead while others are not.

    Args:
        due: When each stream is due, in seconds of ``time.monotonic``.
        margin_s: A stream is far ahead if it is due later than this; 0 lets none wait.
    """
    soon = time.monotonic() + margin_s
    ahead = {name for name, moment in due.items() if moment > soon}
    return ahead if margin_s and len(ahead) < len(due) else set()
