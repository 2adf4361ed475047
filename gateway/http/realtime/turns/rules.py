"""What a client may set of turn detection, in the form of OpenAI's API."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

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
