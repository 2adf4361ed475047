"""Matroska files (RFC 9559) of still pictures at a constant rate, and the sound beside them."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

PictureFormat = Literal["jpeg", "png"]
_CODES: Final[dict[PictureFormat, bytes]] = {"jpeg": b"MJPG", "png": b"MPNG"}
_LENGTH_MARK: Final = 1 << 56
"""Of a length of eight bytes (RFC 8794, 4)."""
_BITMAP_HEADER: Final = struct.Struct("<IiiHH4sIiiII")
_KEY_FRAME: Final = 0x80

_EBML, _DOC_TYPE, _DOC_TYPE_VERSION, _DOC_TYPE_READ_VERSION = 0x1A45DFA3, 0x4282, 0x4287, 0x4285
_SEGMENT, _INFO, _DURATION, _MUXER, _WRITER = 0x18538067, 0x1549A966, 0x4489, 0x4D80, 0x5741
_TRACKS, _TRACK, _NUMBER, _UID, _TYPE = 0x1654AE6B, 0xAE, 0xD7, 0x73C5, 0x83
_CODEC, _PRIVATE, _FRAME_NS = 0x86, 0x63A2, 0x23E383
_VIDEO, _WIDTH, _HEIGHT, _AUDIO, _RATE, _BITS = 0xE0, 0xB0, 0xBA, 0xE1, 0xB5, 0x6264
_CLUSTER, _TIME, _BLOCK = 0x1F43B675, 0xE7, 0xA3


@dataclass(frozen=True)
class Film:
    """What a file holds.

    Attributes:
        pictures: Files of one format, in order.
        width: Of the first picture, in pixels; a player may scale the others to it.
        height: Of the first picture.
        picture_rate: Pictures a second, a divisor of 1000.
        pcm: int16, little-endian, mono.
        rate: Samples a second.
    """

    form: PictureFormat
    pictures: Sequence[bytes]
    width: int
    height: int
    picture_rate: int
    pcm: memoryview
    rate: int


def write_matroska(film: Film) -> bytes:
    """Return a file; equal films have equal files."""
    head = _text(_DOC_TYPE, "matroska") + _number(_DOC_TYPE_VERSION, 4) + _number(_DOC_TYPE_READ_VERSION, 2)
    info = _element(_DURATION, struct.pack(">d", 1000 * len(film.pictures) / film.picture_rate))
    info += _text(_MUXER, "omnirelay") + _text(_WRITER, "omnirelay")
    tracks = _element(_TRACKS, _picture_track(film) + _sound_track(film))
    pieces = [_element(_INFO, info), tracks, *_clusters(film)]
    return b"".join([_element(_EBML, head), _head(_SEGMENT, sum(map(len, pieces))), *pieces])


def _picture_track(film: Film) -> bytes:
    code = _CODES[film.form]
    size = _BITMAP_HEADER.size
    bitmap = _BITMAP_HEADER.pack(size, film.width, film.height, 1, 24, code, 0, 0, 0, 0, 0)
    shown = _number(_WIDTH, film.width) + _number(_HEIGHT, film.height)
    return _track(
        1,
        "V_MS/VFW/FOURCC",
        _element(_PRIVATE, bitmap) + _number(_FRAME_NS, 10**9 // film.picture_rate) + _element(_VIDEO, shown),
    )


def _sound_track(film: Film) -> bytes:
    # Of one channel, which is the default.
    sound = _element(_RATE, struct.pack(">d", film.rate)) + _number(_BITS, 16)
    return _track(2, "A_PCM/INT/LIT", _element(_AUDIO, sound))


def _track(number: int, codec: str, fields: bytes) -> bytes:
    # The number of a track of pictures is that of their type, and so it is for sound.
    numbers = b"".join(_number(name, number) for name in (_NUMBER, _UID, _TYPE))
    return _element(_TRACK, numbers + _text(_CODEC, codec) + fields)


def _clusters(film: Film) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a cluster for each second: times within it have 16 bits."""
    per_second, size = film.picture_rate, 2 * film.rate
    seconds = max(-(-len(film.pictures) // per_second), -(-len(film.pcm) // size))
    for second in range(seconds):
        pictures = film.pictures[second * per_second : (second + 1) * per_second]
        pcm = film.pcm[second * size : (second + 1) * size]
        blocks: list[tuple[int, int, bytes | memoryview]] = [
            (1, 1000 * at // per_second, picture) for at, picture in enumerate(pictures)
        ]
        blocks += [(2, 0, pcm)] if pcm else []
        pieces: list[bytes | memoryview] = [_number(_TIME, 1000 * second)]
        for track, ms, data in blocks:
            begin = struct.pack(">BhB", 0x80 | track, ms, _KEY_FRAME)
            pieces += [_head(_BLOCK, len(begin) + len(data)) + begin, data]
        yield _head(_CLUSTER, sum(map(len, pieces)))
        yield from pieces


def _text(name: int, text: str) -> bytes:
    return _element(name, text.encode())


def _number(name: int, value: int) -> bytes:
    return _element(name, value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big"))


def _element(name: int, data: bytes) -> bytes:
    return _head(name, len(data)) + data


def _head(name: int, size: int) -> bytes:
    return name.to_bytes((name.bit_length() + 7) // 8, "big") + (_LENGTH_MARK | size).to_bytes(8, "big")
