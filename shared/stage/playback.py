"""The playback clock: who needs what is made for them, and when.

A listener needs the next piece of speech only when the last one has been heard.  Work for streams that are
far ahead of their listeners can wait for those that are not (LiveServe, arXiv 2606.22983; VoxServe, arXiv
2602.00269).
"""

import time
from collections.abc import Mapping

PATIENCE_S = 5.0
"""An answer that is wanted whole, not streamed, is due this long after it was asked for."""


class PlaybackClock:
    """When one listener will have heard all that was made for them so far.

    Args:
        streaming: Whether they listen while it is made.

    Attributes:
        due: The time, of ``time.monotonic``, in seconds.  A stream of which nothing was made is due at
            once.
    """

    def __init__(self, streaming: bool) -> None:
        self._streaming = streaming
        self.due = time.monotonic() + (0.0 if streaming else PATIENCE_S)

    def made(self, seconds: float) -> None:
        """Tell that so much more speech was made; who ran dry goes on listening now."""
        if self._streaming:
            self.due = max(self.due, time.monotonic()) + seconds


def has_slack(due: Mapping[str, float], margin_s: float) -> set[str]:
    """Choose the streams that should wait.

    Args:
        due: When each stream that could be worked on is due, in seconds of ``time.monotonic``.
        margin_s: Who has that much to listen to is far ahead; 0 lets nobody wait.

    Returns:
        Those far ahead, if somebody else is not; nobody otherwise.
    """
    soon = time.monotonic() + margin_s
    ahead = {name for name, moment in due.items() if moment > soon}
    return ahead if margin_s and len(ahead) < len(due) else set()
