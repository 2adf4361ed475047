"""A compiler process: ``python -m services.thinker.grammar_worker DESCRIPTOR``.

A schema of 200 bytes can take minutes and gigabytes: in here that costs its own request.
"""

import os
import re
import sys
from functools import partial
from typing import Annotated, Final

import msgspec
import xgrammar
from msgspec import Meta

from omnirelay.errors import said
from services.thinker.media.pipe import Pipe, bound_memory, run_child, serve_jobs

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


NICENESS: Final = 5
"""Added to the thinker's: its steps come first."""
TOO_LARGE: Final = "it needs too much memory: simplify it"
_PLACE: Final = re.compile(r"^\[[^\]]*\] \S+:\d+: ")
"""The time and the line of source with which the library's messages begin."""


def compile_schema(compiler: xgrammar.GrammarCompiler, schema: str) -> bytes | Rejected:
    """Compile a schema to a serialized grammar, or say why there is none."""
    try:
        # Without free white space: models may go on with line breaks until their answer is full.
        grammar = compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        mask = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
        xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(mask)
        if not mask.any():
            return Rejected("it allows no answer")
        return grammar.serialize_json().encode()
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        if "bad_alloc" in str(error):
            return Rejected(TOO_LARGE)
        return Rejected(said(RuntimeError(_PLACE.sub("", str(error).strip()).partition("\n")[0])))
    except MemoryError:
        return Rejected(TOO_LARGE)


def serve(pipe: Pipe) -> None:
    """Compile until the other end is closed: then raises ``EOFError``, or ``OSError`` while sending."""
    limits = pipe.receive(LIMITS)
    vocabulary = xgrammar.TokenizerInfo.deserialize_json(pipe.receive_bytes(limits.vocabulary_bytes).decode())
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    bound_memory(limits.memory_bytes)
    # What the library writes quotes the schema.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    serve_jobs(pipe, JOBS, limits.timeout_s, partial(_work, pipe, compiler))


def _work(pipe: Pipe, compiler: xgrammar.GrammarCompiler, _: CompileJob, schema: bytes) -> None:
    answer = compile_schema(compiler, schema.decode())
    if isinstance(answer, Rejected):
        pipe.send(answer)
    else:
        pipe.send(Compiled(len(answer)), answer)


if __name__ == "__main__":
    os.nice(NICENESS)
    run_child(serve)
