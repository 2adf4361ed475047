"""What a message of a conversation is made of: text, sounds, pictures, videos."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from omnirelay.values import MediaKind

MAX_MESSAGES: Final = 2048
"""Messages of one conversation; with :data:`MAX_PARTS` it bounds what reading a large frame can cost."""
MAX_PARTS: Final = 1024
"""Parts of one message."""

Role = Literal["system", "user", "assistant"]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text as a part of a message's content."""

    text: str


class MediaPart(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
):
    """A sound, picture or video: its file by value, or where it is.  Exactly one of the two is given.

    Attributes:
        data: The bytes of the file, as they are on a disk; decoded, a view of the frame they came in.
        url: A ``data:`` URL, or an ``https:`` one of a host that the gateway may fetch from.
    """

    data: memoryview | None = None
    url: str | None = None

    @property
    def kind(self) -> MediaKind:
        """What it is to the model."""
        kind: MediaKind = self.__struct_config__.tag  # type: ignore[assignment]  # the three below
        return kind

    @property
    def nbytes(self) -> int:
        """Bytes that are given by value."""
        return 0 if self.data is None else memoryview(self.data).nbytes


class AudioPart(MediaPart, frozen=True, tag="audio"):
    """A sound."""


class ImagePart(MediaPart, frozen=True, tag="image"):
    """A picture."""


class VideoPart(MediaPart, frozen=True, tag="video"):
    """A video."""


ContentPart = TextPart | AudioPart | ImagePart | VideoPart


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of the conversation.

    Attributes:
        role: Who speaks.
        content: Text, or parts in the order in which the model meets them.
    """

    role: Role
    content: str | Annotated[Sequence[ContentPart], Meta(max_length=MAX_PARTS)]


def parts_of(message: ChatMessage) -> Sequence[ContentPart]:
    """The parts of a message; a text is one part."""
    return [TextPart(message.content)] if isinstance(message.content, str) else message.content


def media_of(messages: Iterable[ChatMessage]) -> list[tuple[str, MediaPart]]:
    """Every sound, picture and video of a conversation in order, by the name that people read.

    The name is the kind and the number within the kind, from 1: ``audio 1``, ``image 2``.
    """
    numbers: Counter[str] = Counter()
    named: list[tuple[str, MediaPart]] = []
    for message in messages:
        for part in parts_of(message):
            if isinstance(part, MediaPart):
                numbers[part.kind] += 1
                named.append((f"{part.kind} {numbers[part.kind]}", part))
    return named
