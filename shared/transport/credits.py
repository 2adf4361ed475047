"""Byte credits: how much a sender may have on the way to one receiver.

The sender counts the bytes that it hands to ZeroMQ, and now and then sends a :class:`shared.messages.Mark`
behind them.  Who takes a mark has taken all that was before it, and says so with a
:class:`shared.messages.Credit`.  The receiver keeps nothing; whatever is lost, the next mark makes up for it.
See docs/adr/0021.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final

from omnirelay.errors import MessageError

MARKS_PER_WINDOW: Final = 4
"""A mark goes out behind each such part of the window, so that credit is back before it is used up."""
MARK_AGAIN_S: Final = 0.5
"""After that time, who waits for credit asks again: the mark or its credit may be lost."""


class Window:
    """The sender's account of one channel.

    Args:
        size: Most bytes on the way; a message that is larger goes when nothing else is.
        clock: Gives monotonic seconds.

    Attributes:
        channel: Its name, drawn at random: nobody else can give it credit by mistake.
        sent: Bytes handed over since it was opened.
        taken: How many of them the receiver has taken, as far as is known.
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
        """Bytes that may still be on the way."""
        return self.sent - self.taken

    def admits(self, size: int) -> bool:
        """Whether a message of so many bytes may be handed over now."""
        return self.sent == self.taken or self.outstanding + size <= self._size

    def add(self, size: int) -> None:
        """A message of so many bytes was handed over."""
        self.sent += size

    def wants_mark(self, stalled: bool) -> bool:
        """Whether a mark should be sent now.

        Args:
            stalled: A message waits for credit.
        """
        if stalled:
            return self._marked < self.sent or self._clock() >= self._again
        return self.sent - self._marked >= self._size // MARKS_PER_WINDOW

    def marked(self) -> None:
        """A mark was handed over, behind all that was sent."""
        self._marked = self.sent
        self._again = self._clock() + MARK_AGAIN_S

    def credit(self, position: int) -> None:
        """Hear how much the receiver has taken; what is late or repeated changes nothing.

        Raises:
            MessageError: It says more than was sent.
        """
        if position > self.sent:
            raise MessageError(f"credit for {position} bytes of a channel on which {self.sent} were sent")
        self.taken = max(self.taken, position)
