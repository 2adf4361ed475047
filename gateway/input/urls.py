"""Media URLs: decodes ``data:`` and parses https; fetches nothing.  Declared content types are ignored."""

import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from omnirelay.errors import MediaError, MediaTooLargeError, MediaUnreachableError

MAX_HEADER_CHARACTERS: Final = 1024
"""Of a data URL, before its comma."""
MAX_HTTPS_CHARACTERS: Final = 8192
PIECE_CHARACTERS: Final = 2**18
"""Of a data URL, decoded at once; between pieces other threads run."""
MAX_ESCAPES: Final = 2**20
"""Of a data URL; decoding one takes as long as dozens of base64 characters."""
HTTPS_PORT: Final = 443

# Stricter than RFC 3986, so that no two parsers disagree: no user, brackets, or escapes in the host.
_HTTPS = re.compile(r"(?i:https)://([A-Za-z0-9.-]{1,253})(?::([0-9]{1,5}))?((?:[/?][!-~]*)?)")
_HOST = re.compile(r"([A-Za-z0-9.-]{1,253})(?::([0-9]{1,5}))?")
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True)
class HttpsUrl:
    """A parsed https URL: host in lower case, and path and query as written, without the fragment."""

    host: str
    port: int
    target: str


def is_data_url(url: str) -> bool:
    """It is a ``data:`` URL."""
    return url[:5].lower() == "data:"


def parse_host(text: str) -> tuple[str, int] | None:
    """Split ``HOST`` or ``HOST:PORT``; none if malformed."""
    if (match := _HOST.fullmatch(text)) is None:
        return None
    port = int(match[2] or HTTPS_PORT)
    return (match[1].lower(), port) if 0 < port < 2**16 else None


def parse_https(name: str, url: str) -> HttpsUrl:
    """Parse an https URL; MediaUnreachableError, with the item's name, if it is malformed or ambiguous."""
    if len(url) > MAX_HTTPS_CHARACTERS:
        raise MediaUnreachableError(
            f"{name}: its URL has {len(url)} characters, at most {MAX_HTTPS_CHARACTERS} are allowed"
        )
    match = _HTTPS.fullmatch(url.partition("#")[0])
    place = parse_host(f"{match[1]}:{match[2] or HTTPS_PORT}") if match else None
    if match is None or place is None:
        raise MediaUnreachableError(
            f"{name}: {url[:64]!r} is neither a data: URL nor https://HOST[:PORT]/PATH "
            "in plain ASCII without a user"
        )
    target = match[3] if match[3].startswith("/") else f"/{match[3]}"
    return HttpsUrl(*place, target)


def decode_data_url(name: str, url: str, max_bytes: int) -> bytearray:
    """Decode a ``data:`` URL (RFC 2397), base64 or percent-encoded; MediaError, with the item's name."""
    header, comma, _ = url[:MAX_HEADER_CHARACTERS].partition(",")
    if not comma:
        raise MediaError(f"{name}: its data URL has no comma in its first {MAX_HEADER_CHARACTERS} characters")
    start = len(header) + 1
    base64 = header.rstrip().lower().endswith(";base64")
    escapes = url.count("%", start)
    size = len(url) - start - 2 * escapes
    if base64:
        size = size * 3 // 4 - url.count("=", -2)
    if size > max_bytes:
        problem = f"{size} bytes, at most {max_bytes} are allowed (media.max_item_bytes)"
        raise MediaTooLargeError(f"{name}: {problem}")
    if escapes > MAX_ESCAPES:
        raise MediaTooLargeError(
            f"{name}: its data URL has {escapes} %-escapes, at most {MAX_ESCAPES} are taken: "
            "write it in base64"
        )
    try:
        pieces = _percent_decoded(url, start)
        return decode_base64(pieces) if base64 else bytearray().join(pieces)
    except ValueError as error:
        # binascii.Error, UnicodeEncodeError, and ours.
        # Python's message quotes the URL.
        why = "a character that is not ASCII" if isinstance(error, UnicodeEncodeError) else error
        raise MediaError(f"{name}: its data URL cannot be decoded: {why}") from error


def _percent_decoded(url: str, start: int) -> Iterator[bytes]:
    """Decode from ``start`` on, in pieces that split no escape."""
    while start < len(url):
        end = start + PIECE_CHARACTERS
        escape = url.rfind("%", end - 2, end)
        if escape >= 0 and end < len(url):
            end = escape
        piece = url[start:end].encode("ascii")
        start = end
        if b"%" in piece:
            if _BROKEN_ESCAPE.search(piece):
                raise ValueError("a % without two hexadecimal digits")
            piece = unquote_to_bytes(piece)
        yield piece


def decode_base64(pieces: Iterator[bytes]) -> bytearray:
    """Decode base64, padded or not, in short pieces, so that other threads run; ValueError if malformed."""
    decoded, rest, padded = bytearray(), b"", False
    for piece in pieces:
        rest += piece
        whole = len(rest) // 4 * 4
        if padded and rest:
            raise ValueError("base64 goes on behind its padding")
        padded = b"=" in rest[:whole]
        decoded += binascii.a2b_base64(rest[:whole], strict_mode=True)
        rest = rest[whole:]
    if padded and rest:
        raise ValueError("base64 goes on behind its padding")
    decoded += binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True)
    return decoded
