"""Byte credits: how much a sender may have in flight to one receiver.

The sender counts the bytes that it hands to ZeroMQ and sometimes sends a :class:`shared.messages.Mark`
after them.  The receiver of a mark has taken everything before it, and answers with a
:class:`shared.messages.Credit`.  It keeps no state; a later mark replaces a lost one.  See docs/adr/0021.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final

from omnirelay.errors import MessageError

MARKS_PER_WINDOW: Final = 4
"""A mark follows each such part of the window, so that credit returns before the window is used up."""
MARK_AGAIN_S: Final = 0.5
"""A sender that waits for credit repeats its mark after this time: mark or credit may be lost."""


class Window:
    """The sender's account of one channel.

    Args:
        size: Most bytes in flight; a larger message goes when nothing else is in flight.

    Attributes:
        channel: Its random name.
        sent: Bytes handed over since it was opened.
        taken: Bytes that the receiver has credited.
    """

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.channel: Final = secrets.token_hex(8)
        self.sent = 0
        self.taken = 0
        self._size = size
        self._clock = clock
        self._marked = 0
        self._again = 0.0

    @property
    def outstanding(self) -> int:
        """Bytes that may still be in flight."""
        return self.sent - self.taken

    def admits(self, size: int) -> bool:
        """Whether a message of this size may be handed over now."""
        return self.sent == self.taken or self.outstanding + size <= self._size

    def add(self, size: int) -> None:
        """A message of this size was handed over."""
        self.sent += size

    def wants_mark(self, stalled: bool) -> bool:
        """Whether to send a mark now; ``stalled`` means that a message waits for credit."""
        if stalled:
            return self._marked < self.sent or self._clock() >= self._again
        return self.sent - self._marked >= self._size // MARKS_PER_WINDOW

    def marked(self) -> None:
        """A mark was handed over."""
        self._marked = self.sent
        self._again = self._clock() + MARK_AGAIN_S

    def credit(self, position: int) -> None:
        """Take a credit, late or repeated too; :class:`MessageError` if it exceeds what was sent."""
        if position > self.sent:
            raise MessageError(f"credit for {position} bytes of a channel on which {self.sent} were sent")
        self.taken = max(self.taken, position)
