"""Decoding in tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from services.thinker.media.decoded import Decoded, DecodedAudio, DecodedImage, DecodeLimits
from services.thinker.media.decoder import WORKER, MediaDecoder

LIMITS = DecodeLimits(
    max_audio_seconds=60.0,
    min_image_side=8,
    max_image_pixels=50_000_000,
    max_video_seconds=60.0,
    max_video_frames=120,
    max_decoded_bytes=160_000_000,
    timeout_s=60.0,
)


def limits(**changes: Any) -> DecodeLimits:
    """The limits, but for some of them."""
    return msgspec.structs.replace(LIMITS, **changes)


@contextmanager
def decoding(command: Sequence[str] = WORKER, **changes: Any) -> Iterator[MediaDecoder]:
    """A decoder within the limits, but for some of them, that is closed at the end."""
    decoder = MediaDecoder(limits(**changes), command=command)
    try:
        yield decoder
    finally:
        decoder.close()


def nbytes(decoded: Decoded) -> int:
    """Bytes of the samples and the pixels of a file."""
    if isinstance(decoded, DecodedAudio):
        return decoded.samples.nbytes
    if isinstance(decoded, DecodedImage):
        return decoded.pixels.nbytes
    return decoded.frames.nbytes + (0 if decoded.audio is None else decoded.audio.nbytes)
