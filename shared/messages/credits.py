"""Byte credits: how far a sender has come, and that the receiver has taken all of it."""

from typing import Annotated

import msgspec
from msgspec import Meta

Sender = Annotated[
    str, Meta(max_length=140, pattern=r"^(gateway|thinker|talker|token2wav)\.[A-Za-z0-9_-]{1,128}\Z")
]
"""A stage's replica, as it goes by on the control socket, or the gateway."""
Channel = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Position = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="mark"):
    """Any sender to its receiver, between its other messages: tell me when you have come to this.

    Attributes:
        sender: Who is to be told.
        channel: The sending queue, by the name that it drew.
        position: Bytes that the queue has sent before.
    """

    sender: Sender
    channel: Channel
    position: Position


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="credit"):
    """Receiver to sender, on the control socket and over the gateway: I have taken all before this mark.

    Attributes are those of :class:`Mark`.
    """

    sender: Sender
    channel: Channel
    position: Position
