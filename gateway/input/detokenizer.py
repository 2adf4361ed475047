"""Incremental detokenization.

``tokenizers.decoders.DecodeStream`` raises on sequences that are not UTF-8, which a model may produce.
The output here, joined, equals ``Tokenizer.decode`` of all ids.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import Tokenizer


def _byte_level_alphabet() -> dict[str, int]:
    """The byte of each character in a byte-level BPE (GPT-2, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + index) for index in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))


_ALPHABET: Final = _byte_level_alphabet()


class Detokenizer:
    """The text of one token stream; ``special_ids`` have none."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        # "replace" treats invalid UTF-8 as the tokenizer's decoder does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that tokens add; at the end incomplete characters become replacement characters."""
        piece = self._decoder.decode(b"".join(map(self._bytes_of, self._textual(token_ids))), last)
        self._pieces.append(piece)
        return piece

    def _textual(self, token_ids: Iterable[int]) -> Iterable[str]:
        for token_id in token_ids:
            if token_id not in self._special_ids:
                # Embedding tables are padded, so ids beyond the vocabulary occur.
                yield self._tokenizer.id_to_token(token_id) or ""

    @staticmethod
    def _bytes_of(token: str) -> bytes:
        try:
            return bytes(_ALPHABET[character] for character in token)
        except KeyError:
            # An added token is its own text.
            return token.encode()
