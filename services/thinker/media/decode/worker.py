"""A decoder process: ``python -m services.thinker.media.decode.worker DESCRIPTOR``.

It decodes one file after the other for the thinker that started it, and ends when the thinker closes its end
of the socket pair, or is gone.  Files come from anywhere and decoders are written in C: a crash, an endless
loop or a bomb in here costs one file.
"""

import gc
import resource
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Final

from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media.decode.pipe import JOBS, LIMITS, DecodeJob, Done, Pipe, Ready, Refused
from services.thinker.media.decoded import Pixels, Samples
from services.thinker.media.files.animation import decode_animation
from services.thinker.media.files.audio import decode_audio, decode_sound_track
from services.thinker.media.files.formats import DEMUXERS, check_format
from services.thinker.media.files.image import decode_image
from services.thinker.media.files.video import decode_video
from services.thinker.media.limits import DecodeLimits

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
    return decode_animation(data, form, limits), None


def serve(pipe: Pipe) -> None:
    """Decode until the other end is closed: then raises ``EOFError``, or ``OSError`` while sending."""
    limits = pipe.receive(LIMITS)
    _bound_memory(limits)
    pipe.send(Ready())
    while True:
        job = pipe.receive(JOBS)
        # The thinker ends a decoder that is late.  Where it cannot, being gone, the alarm does.
        signal.setitimer(signal.ITIMER_REAL, 1 + 1.25 * limits.timeout_s)
        _work(pipe, job, limits)
        # A frame whose display matrix was read is in a cycle of references, and its pixels with it.
        gc.collect()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _work(pipe: Pipe, job: DecodeJob, limits: DecodeLimits) -> None:
    data = bytearray(job.size)
    pipe.receive_into(memoryview(data))
    try:
        pixels, samples = decode(bytes(data), job, limits)
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


def _bound_memory(limits: DecodeLimits) -> None:
    """Let allocations fail that no honest file needs, and crashes leave no core."""
    # Seventh column of proc_pid_statm(5): what RLIMIT_DATA counts, and the stack.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    bound = (
        pages * resource.getpagesize()
        + _MEMORY_BASE
        + _MEMORY_PER_PIXEL * limits.max_image_pixels
        + _MEMORY_PER_DECODED_BYTE * limits.max_decoded_bytes
    )
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Serve the thinker."""
    # Ctrl-C reaches the whole group; the thinker closes its decoders itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What Pillow and numpy think of strange files is of no use in the thinker's log.
    warnings.simplefilter("ignore")
    try:
        serve(Pipe(socket.socket(fileno=int(sys.argv[1]))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Nobody is there to be told: an ordinary end.
        return


if __name__ == "__main__":
    main()
