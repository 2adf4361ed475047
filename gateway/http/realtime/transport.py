"""How a session reaches its client."""

import binascii
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol

Send = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Sends an event of a type with fields; raises ClientGoneError if the client disconnected."""


class Played(NamedTuple):
    """How much of an answer's speech was played.

    Attributes:
        place: The ids of the answer, as in its events.
        ms: Rounded down.
    """

    place: dict[str, Any]
    ms: int


class Transport(Protocol):
    """Takes the events and the speech of a session's answers to its client."""

    @property
    def plays(self) -> bool:
        """Whether it plays the speech, rather than the client."""

    @property
    def send(self) -> Send:
        """Sends an event."""

    async def send_audio(self, place: dict[str, Any], pcm: bytes, start_delay_ms: int) -> None:
        """Send a piece of an answer's speech.

        Args:
            place: The ids of the answer, as in its events.
            pcm: Whole samples: int16, little-endian, mono, 24 kHz; codes of G.711, where the client plays it
                and the session says so.
            start_delay_ms: How long to wait before it is played; 0 but for the first piece.

        Raises:
            ClientGoneError: The client disconnected.
        """

    def stop_audio(self) -> list[Played]:
        """Stop playing, and return what was played of each answer that is cut; none if the client plays."""


class EventTransport:
    """Sends speech in events, as base64, for a client that plays it."""

    plays: Final = False

    def __init__(self, send: Send) -> None:
        self.send: Final[Send] = send

    async def send_audio(self, place: dict[str, Any], pcm: bytes, start_delay_ms: int) -> None:
        """See :meth:`Transport.send_audio`."""
        told = {**place, "delta": binascii.b2a_base64(pcm, newline=False).decode()}
        if start_delay_ms:
            told["start_delay_ms"] = start_delay_ms
        await self.send("response.output_audio.delta", told)

    def stop_audio(self) -> list[Played]:
        """Return nothing: only the client knows."""
        return []
