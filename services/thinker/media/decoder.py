"""Decodes media files in a process of its own."""

import logging
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from threading import Lock
from typing import Final

import msgspec
import numpy as np

from omnirelay.errors import BusyError, MediaError, MediaTooLargeError, MessageError
from services.thinker.media.decoded import Decoded, DecodedAudio, DecodedImage, DecodedVideo, DecodeLimits
from services.thinker.media.pipe import ANSWERS, STARTS, DecodeJob, Done, Pipe
from shared.ending import ending_of
from shared.messages import MediaKind

WORKER: Final = (sys.executable, "-m", "services.thinker.media.worker")
RETRY_MS: Final = 5000
"""When a child that cannot be started now is worth another try."""
_START_S: Final = 60.0
_END_S: Final = 5.0


class DecoderProcess:
    """A child, started with its end of the socket pair; raises ``OSError`` if it cannot be."""

    def __init__(self, command: Sequence[str]) -> None:
        self.ready = False
        ours, theirs = socket.socketpair()
        self.pipe: Final = Pipe(ours)
        try:
            with theirs:
                self._process: Final = subprocess.Popen(  # noqa: S603  The program is our own.
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=_environment(),
                )
        except OSError:
            ours.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return ending_of(self._process.poll())

    def wait_until_ready(self, limits: msgspec.Struct, *data: bytes) -> None:
        """Give it its limits and what follows them, and wait until it takes files.

        Raises MessageError at another answer or none, ``EOFError`` or ``OSError`` if it ended.
        """
        self.pipe.set_deadline(_START_S)
        try:
            self.pipe.send(limits, *data)
            self.pipe.receive(STARTS)
        except TimeoutError as error:
            raise MessageError(f"it has not started within {_START_S:g} s") from error
        self.ready = True

    def kill(self) -> None:
        """End it at once.  May be called by any thread, also while another one waits for the child."""
        self._process.kill()

    def end(self) -> None:
        """Let it end, close the pipe, and wait until it is gone."""
        self.pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    """The thinker's, for a process that multiplies no matrices: threads for that would take memory."""
    # On a CPU, vLLM has libraries of PyTorch preloaded into every child.
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return own | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


logger = logging.getLogger(__name__)

_DIMENSIONS: Final[dict[MediaKind, int]] = {"audio": 0, "image": 3, "video": 4}
"""Of the pixels of each kind."""


class MediaDecoder:
    """Turns media files into arrays, one at a time.

    The work is done by a child process, which is started when it is first needed and replaced when it dies.
    Nothing that the child says is believed before it is checked.
    """

    def __init__(self, limits: DecodeLimits, *, command: Sequence[str] = WORKER) -> None:
        self._limits: Final = limits
        self._command: Final = command
        # Whoever has the turn talks to the child, starts it and ends it.
        self._turn: Final = Lock()
        # Held for moments only: a child is there, or there will be none any more.
        self._state: Final = Lock()
        self._child: DecoderProcess | None = None
        self._closed = False

    def start(self) -> None:
        """Start the child already; raises BusyError if that cannot be, MediaError if it was closed."""
        with self._turn:
            self._current_child()

    def decode(
        self, kind: MediaKind, data: memoryview | bytes, *, name: str, with_audio: bool = False
    ) -> Decoded:
        """Decode a whole file, of a video with its sound if wanted; calls of any threads take turns.

        Raises MediaError if it cannot be used, MediaTooLargeError if it is larger or longer than allowed; the
        message begins with ``name``, as ``audio 2``.  Raises BusyError if no child can be started.
        """
        job = DecodeJob(kind, len(data), with_audio and kind == "video")
        with self._turn:
            try:
                return self._decode(job, data)
            except MediaError as error:
                raise type(error)(f"{name}: {error}") from error

    def close(self) -> None:
        """End the child.  A decode in progress on another thread fails, and so does every later one."""
        with self._state:
            self._closed = True
            if self._child is not None and self._turn.locked():
                self._child.kill()
        with self._turn:
            if self._child is not None:
                self._child.end()
                self._child = None

    def _decode(self, job: DecodeJob, data: memoryview | bytes) -> Decoded:
        while True:
            child = self._current_child()
            used = child.ready
            try:
                return self._ask(child, job, data)
            except TimeoutError as error:
                child.kill()
                self._lose(child)
                raise MediaError(f"it took longer than {self._limits.timeout_s:g} s to decode") from error
            except (EOFError, OSError, MessageError, MemoryError) as error:
                if isinstance(error, MessageError):
                    child.kill()
                self._lose(child)
                if self._closed:
                    raise MediaError("decoding was stopped") from error
                # An earlier file may have damaged a child, or have left it too little memory.
                if not used:
                    raise _failure(error, child.ending) from error

    def _ask(self, child: DecoderProcess, job: DecodeJob, data: memoryview | bytes) -> Decoded:
        if not child.ready:
            child.wait_until_ready(self._limits)
        child.pipe.set_deadline(self._limits.timeout_s)
        child.pipe.send(job, data)
        answer = child.pipe.receive(ANSWERS)
        if isinstance(answer, Done):
            return self._receive(child.pipe, job, answer)
        if answer.reason == "memory":
            raise MemoryError
        message = answer.message if answer.message.isprintable() else repr(answer.message)
        raise (MediaTooLargeError if answer.reason == "too_large" else MediaError)(message)

    def _current_child(self) -> DecoderProcess:
        with self._state:
            if self._closed:
                raise MediaError("decoding was stopped")
            if self._child is not None and not self._child.alive:
                self._lose(self._child)
            try:
                self._child = self._child or DecoderProcess(self._command)
            except OSError as error:
                raise BusyError(f"no decoder starts ({error.strerror}); try again", RETRY_MS) from error
            return self._child

    def _lose(self, child: DecoderProcess) -> None:
        child.end()
        self._child = None
        logger.warning("decoder %d %s; the next file gets a new one", child.pid, child.ending)

    def _receive(self, pipe: Pipe, job: DecodeJob, done: Done) -> Decoded:
        """Read what the child decoded, once it is sure that it can be that."""
        _check(job, done, self._limits)
        pixels = np.empty(done.pixels or (0,), np.uint8)
        samples = np.empty(done.samples or 0, np.float32)
        pipe.receive_into(pixels.data.cast("B"))
        pipe.receive_into(samples.data.cast("B"))
        if not np.isfinite(samples).all():
            raise MessageError("samples that are infinite or no numbers")
        if job.kind == "audio":
            return DecodedAudio(samples)
        if job.kind == "image":
            return DecodedImage(pixels)
        return DecodedVideo(pixels, samples if job.with_audio else None)


def _failure(error: Exception, ending: str) -> MediaError:
    """What to tell of a file that its decoder failed on."""
    if isinstance(error, MemoryError):
        return MediaTooLargeError("it needs more memory than allowed to be decoded")
    if isinstance(error, MessageError):
        return MediaError(f"its decoder gave an answer that cannot be: {error}")
    return MediaError(f"its decoder {ending}")


def _check(job: DecodeJob, done: Done, limits: DecodeLimits) -> None:
    """Raise MessageError at shapes that no such file can have."""
    shape, count = done.pixels or (), done.samples
    if len(shape) != _DIMENSIONS[job.kind] or (count is None) == (job.kind == "audio" or job.with_audio):
        raise MessageError(f"pixels of shape {shape} and {count} samples of a file sent as {job.kind}")
    if shape:
        *frames, height, width, colours = shape
        if colours != 3 or math.prod(shape) > limits.max_decoded_bytes:
            raise MessageError(f"pixels of shape {shape}")
        if frames and (frames[0] > limits.max_video_frames or frames[0] % limits.temporal_patch_size):
            raise MessageError(f"{frames[0]} frames")
        try:
            limits.check_sides(width, height)
        except MediaError as error:
            raise MessageError(str(error)) from error
    seconds = limits.max_audio_seconds if job.kind == "audio" else limits.max_video_seconds
    if count is not None and count > seconds * limits.sampling_rate + 1:
        raise MessageError(f"{count} samples")
