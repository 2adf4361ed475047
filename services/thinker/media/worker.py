"""A process that decodes files: ``python -m services.thinker.media.worker DESCRIPTOR``."""

import gc
import warnings
from functools import partial
from typing import Final

from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media.audio import decode_audio, decode_sound_track
from services.thinker.media.decoded import DecodeLimits, Pixels, Samples
from services.thinker.media.formats import DEMUXERS, check_format
from services.thinker.media.image import decode_image
from services.thinker.media.pipe import (
    JOBS,
    LIMITS,
    DecodeJob,
    Done,
    Pipe,
    Refused,
    bound_memory,
    run_child,
    serve_jobs,
)
from services.thinker.media.video import decode_animation, decode_video

_MEMORY_BASE: Final = 512 * 2**20
_MEMORY_PER_PIXEL: Final = 24
"""Of the largest picture: in several modes at once, or as frames that later frames refer to."""
_MEMORY_PER_DECODED_BYTE: Final = 2


def decode(data: bytes, job: DecodeJob, limits: DecodeLimits) -> tuple[Pixels | None, Samples | None]:
    """Decode a file to pixels, none from a sound, and samples, none from a picture or where not wanted."""
    form = check_format(job.kind, data)
    if job.kind == "audio":
        return None, decode_audio(data, form, limits)
    if job.kind == "image":
        return decode_image(data, limits), None
    if form in DEMUXERS:
        frames = decode_video(data, form, limits)
        return frames, decode_sound_track(data, form, limits) if job.with_audio else None
    if job.with_audio:
        raise MediaError("there is no sound track in an animated picture; use_audio_in_video needs one")
    return decode_animation(data, limits), None


def serve(pipe: Pipe) -> None:
    """Decode until the other end is closed: then raises ``EOFError``, or ``OSError`` while sending."""
    limits = pipe.receive(LIMITS)
    # No honest file needs more.
    bound_memory(
        _MEMORY_BASE
        + _MEMORY_PER_PIXEL * limits.max_image_pixels
        + _MEMORY_PER_DECODED_BYTE * limits.max_decoded_bytes
    )
    serve_jobs(pipe, JOBS, limits.timeout_s, partial(_work, pipe, limits))


def _work(pipe: Pipe, limits: DecodeLimits, job: DecodeJob, data: bytes) -> None:
    try:
        pixels, samples = decode(data, job, limits)
    except MediaTooLargeError as error:
        pipe.send(Refused("too_large", str(error)))
    except MediaError as error:
        pipe.send(Refused("invalid", str(error)))
    except MemoryError:
        pipe.send(Refused("memory", "out of memory"))
    else:
        done = Done(
            pixels=None if pixels is None else pixels.shape, samples=None if samples is None else samples.size
        )
        pipe.send(done, *(array.data.cast("B") for array in (pixels, samples) if array is not None))
    # A frame whose display matrix was read is in a cycle of references, and its pixels with it.
    gc.collect()


if __name__ == "__main__":
    # What Pillow and numpy think of strange files is of no use in the thinker's log.
    warnings.simplefilter("ignore")
    run_child(serve)
