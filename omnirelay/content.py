"""Content of a conversation's messages: text, audio, images, videos."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from omnirelay.values import MediaKind

MAX_MESSAGES: Final = 2048
"""Messages per conversation; with :data:`MAX_PARTS` it limits the cost of decoding a large frame."""
MAX_PARTS: Final = 1024
"""Parts per message."""

Role = Literal["system", "user", "assistant"]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text as a part of a message."""

    text: str


class MediaPart(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
):
    """An audio, image or video file, by value or by URL; exactly one of the two is given.

    Attributes:
        data: The bytes of the file.  After decoding, a view of the received frame.
        url: A ``data:`` URL, or an ``https:`` one of a host that the gateway may fetch from.
    """

    data: memoryview | None = None
    url: str | None = None

    @property
    def kind(self) -> MediaKind:
        """Which kind of media it is."""
        kind: MediaKind = self.__struct_config__.tag  # type: ignore[assignment]  # the three below
        return kind

    @property
    def nbytes(self) -> int:
        """Number of bytes given by value."""
        return 0 if self.data is None else memoryview(self.data).nbytes


class AudioPart(MediaPart, frozen=True, tag="audio"):
    """Audio."""


class ImagePart(MediaPart, frozen=True, tag="image"):
    """An image."""


class VideoPart(MediaPart, frozen=True, tag="video"):
    """A video."""


ContentPart = TextPart | AudioPart | ImagePart | VideoPart


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation; its parts are in the order in which the model sees them.

    Attributes:
        role: The speaker.
        content: The content, in the model's order.
    """

    role: Role
    content: str | Annotated[Sequence[ContentPart], Meta(max_length=MAX_PARTS)]


def parts_of(message: ChatMessage) -> Sequence[ContentPart]:
    """The parts of a message; a plain text is one part."""
    return [TextPart(message.content)] if isinstance(message.content, str) else message.content


def media_of(messages: Iterable[ChatMessage]) -> list[tuple[str, MediaPart]]:
    """All media of a conversation in order, each with its name in messages: ``audio 1``, ``image 2``."""
    numbers: Counter[str] = Counter()
    named: list[tuple[str, MediaPart]] = []
    for message in messages:
        for part in parts_of(message):
            if isinstance(part, MediaPart):
                numbers[part.kind] += 1
                named.append((f"{part.kind} {numbers[part.kind]}", part))
    return named
