"""Long strings of a JSON body, which are not parsed with the rest of it.

Parsing would copy a base64 file of many megabytes into a string, and decoding would copy it again, each in a
call that blocks all other threads.  So long strings are cut out before parsing, and decoded in pieces.
"""

import re
import secrets
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from gateway.http.body import MAX_MEMBERS, MAX_VALUES, SEARCHED, find, read_object
from gateway.input.urls import MAX_HEADER_CHARACTERS, PIECE_CHARACTERS, decode_base64, is_data_url
from omnirelay.content import AudioPart, ImagePart, VideoPart
from omnirelay.errors import InvalidRequestError

MIN_LENGTH: Final = 2**16
"""Bytes of a string that is cut out, at least."""
T = TypeVar("T", AudioPart, ImagePart, VideoPart)
QUOTE: Final = b'"'
BACKSLASH: Final = b"\\"
_PIECE: Final = re.compile(rb'(?:[^"\\]++|\\.)++', re.DOTALL)
"""Of a string."""
MAX_STRINGS: Final = MAX_VALUES + MAX_MEMBERS
"""A body that has more is refused, whatever they are."""
BARE: Final = "data:;base64,"
"""Prefix that makes a URL of bare base64."""


class LongStrings:
    """The long strings of a body, replaced by unguessable words; files over ``max_bytes`` stay base64."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._word = secrets.token_hex(16)
        self._found: dict[str, memoryview] = {}

    def cut(self, body: bytearray) -> bytearray:
        """Replace each long string without escapes by a word."""
        if len(body) < MIN_LENGTH:
            return body
        view, short, done = memoryview(body), bytearray(), 0
        for start, end in islice(_strings(body), MAX_STRINGS):
            if end - start >= MIN_LENGTH and find(body, BACKSLASH, start, end) < 0:
                word = f"{self._word}{len(self._found)}"
                self._found[word] = view[start:end]
                short += view[done:start]
                short += word.encode()
                done = end
        short += view[done:]
        return short

    def has_word(self, value: str) -> bool:
        """Whether a string that is short now was cut out, or a part of it."""
        return self._word in value

    def text(self, value: str) -> str:
        """Return the string that a word replaces, or any other string as it is.

        Raises:
            UnicodeDecodeError: It is not UTF-8.
        """
        found = self._found.get(value)
        return value if found is None else str(found, "utf-8")

    def media(self, kind: type[T], value: str, bare_at: str | None = None) -> T:
        """Build a sound, picture or video from its URL, or from the word that replaces it.

        Where ``bare_at``, its place in the request, is given, it may also be bare base64.

        Raises:
            InvalidRequestError: It is neither a URL nor base64.
            UnicodeDecodeError: It is not UTF-8.
        """
        found = self._found.get(value)
        if found is not None:
            data = self._decoded(found, bare_at is not None)
            if data is not None:
                return kind(data=memoryview(data))
            # The gateway reports what is wrong with it.
            value = self.text(value)
        if bare_at is None or is_data_url(value):
            return kind(url=value)
        if "%" in value:
            # In a data: URL it would begin an escape.
            raise InvalidRequestError(f"{bare_at} is not base64", bare_at)
        return kind(url=BARE + value)

    def _decoded(self, raw: memoryview, bare: bool) -> bytearray | None:
        """Decode plain base64; none for anything else."""
        header, comma, _ = bytes(raw[:MAX_HEADER_CHARACTERS]).partition(b",")
        if comma:
            if not header.lower().startswith(b"data:") or not header.lower().endswith(b";base64"):
                return None
            raw = raw[len(header) + 1 :]
        elif not bare:
            return None
        if len(raw) // 4 * 3 > self._max_bytes + 2:
            return None
        pieces = (bytes(raw[at : at + PIECE_CHARACTERS]) for at in range(0, len(raw), PIECE_CHARACTERS))
        try:
            return decode_base64(pieces)
        except ValueError:
            return None


class Body(NamedTuple):
    """A parsed body, and its long strings, for which words stand in ``values``."""

    values: dict[str, Any]
    strings: LongStrings


def parse(body: bytearray, max_item_bytes: int) -> Body:
    """Parse a body, or raise InvalidRequestError."""
    strings = LongStrings(max_item_bytes)
    return Body(read_object(strings.cut(body)), strings)


def _strings(body: bytearray) -> Iterator[tuple[int, int]]:
    """Find the strings, without their quotes."""
    start = find(body, QUOTE)
    while start >= 0:
        end = start + 1
        # In pieces, so that other threads can run in between; quotes one by one take a minute.
        while (piece := _PIECE.match(body, end, end + SEARCHED)) is not None:
            end = piece.end()
        if body[end : end + 1] != QUOTE:
            return
        yield start + 1, end
        start = find(body, QUOTE, end + 1)
