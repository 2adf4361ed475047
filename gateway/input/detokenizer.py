"""Incremental detokenization.

``tokenizers.decoders.DecodeStream`` raises on sequences that are not UTF-8, which a model may produce.
The output here, joined, equals ``Tokenizer.decode`` of all ids.
"""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from tokenizers import Tokenizer

MAX_CACHED_TOKENS: Final = 2**16
"""Tokens whose bytes are kept: most of those that a model of language writes."""


def _byte_level_alphabet() -> dict[str, int]:
    """The byte of each character in a byte-level BPE (GPT-2, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + index) for index in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))


_ALPHABET: Final = _byte_level_alphabet()


class Detokenizer:
    """The text of a token stream; ``special_ids`` have none, and before one of ``stop`` it is ``stopped``."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        # "replace" treats invalid UTF-8 as the tokenizer's decoder does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._stop = stop
        self._held = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that tokens add; at the end incomplete characters become replacement characters."""
        if self.stopped:
            return ""
        token, special = self._tokenizer.id_to_token, self._special_ids
        # Embedding tables are padded, so ids beyond the vocabulary occur.
        parts = [bytes_of(token(each) or "") for each in token_ids if each not in special]
        piece = self._decoder.decode(b"".join(parts), last)
        if self._stop:
            piece = self._until_stop(self._held + piece, last)
        self._pieces.append(piece)
        return piece

    def _until_stop(self, text: str, last: bool) -> str:
        """Cut a text before a stop, and hold back what may be the beginning of one."""
        found = [at for at in map(text.find, self._stop) if at >= 0]
        self.stopped = bool(found)
        if found or last:
            self._held = ""
            return text[: min(found, default=None)]
        most = min(len(text), max(map(len, self._stop)) - 1)
        held = next((n for n in range(most, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


@lru_cache(maxsize=MAX_CACHED_TOKENS)
def bytes_of(token: str) -> bytes:
    """The bytes that a token stands for."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        # An added token is its own text.
        return token.encode()
