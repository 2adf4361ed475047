"""What the thinker and its compiler process say to each other, over the pipe of the media decoders."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

_Size = Annotated[int, Meta(ge=0, lt=2**28)]


class CompileLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="limits"):
    """Thinker to compiler: what one schema may take; the tokenizer's vocabulary, as JSON, follows."""

    vocabulary_bytes: _Size
    memory_bytes: int
    timeout_s: float


class CompileJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="job"):
    """Thinker to compiler: compile this schema, whose bytes follow."""

    size: _Size


class Compiled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="compiled"):
    """Compiler to thinker: the grammar follows, serialized."""

    size: _Size


class Rejected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rejected"):
    """Compiler to thinker: why there is no grammar."""

    message: Annotated[str, Meta(max_length=1000)]


LIMITS: Final = msgspec.msgpack.Decoder(CompileLimits)
JOBS: Final = msgspec.msgpack.Decoder(CompileJob)
ANSWERS: Final[msgspec.msgpack.Decoder[Compiled | Rejected]] = msgspec.msgpack.Decoder(Compiled | Rejected)
