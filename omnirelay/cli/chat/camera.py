"""The camera of ``omnirelay chat``: each message is sent with a picture of what it shows."""

import logging
import threading
import time
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Self

from omnirelay.content import ImagePart
from omnirelay.errors import MediaError, MissingPackageError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer

DEVICES: Final = {"/dev/": "v4l2", "avfoundation:": "avfoundation", "dshow:": "dshow"}
"""What a source begins with, and the input format by which FFmpeg opens it."""
LONGER_SIDE: Final = 896
"""Pixels of a picture at most: larger ones are more prompt tokens."""
FIRST_FRAME_S: Final = 10.0
CLOSING_S: Final = 1.0
log = logging.getLogger(__name__)


class Camera:
    """Keeps the newest frame of a device, an address or a file; a file is played once, at its own speed.

    Args:
        source: ``/dev/video0``, ``avfoundation:0``, ``dshow:video=NAME``, or what FFmpeg opens.

    Raises:
        MissingPackageError: PyAV is not installed.
        MediaError: The source cannot be opened or has no pictures.
    """

    def __init__(self, source: str) -> None:
        try:
            import av  # noqa: PLC0415 - only here
        except ImportError as error:
            raise MissingPackageError("PyAV", "camera") from error
        self._av, self._source = av, source
        begin, form = next((each for each in DEVICES.items() if source.startswith(each[0])), ("", None))
        name = source.removeprefix(begin) if begin.endswith(":") else source
        try:
            self._container: InputContainer = av.open(name, format=form, timeout=FIRST_FRAME_S)
        except (av.FFmpegError, ValueError) as error:
            # ValueError: an input format of another operating system.
            raise MediaError(f"--camera {source}: {error}") from error
        if not self._container.streams.video:
            self._container.close()
            raise MediaError(f"--camera {source}: it has no pictures")
        self._frame: VideoFrame | None = None
        self._seen, self._closing = threading.Event(), threading.Event()
        self._reader = threading.Thread(target=self._read, name="camera", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._reader.join(CLOSING_S)

    def picture(self) -> ImagePart:
        """Return the newest frame as JPEG.

        Raises:
            MediaError: There is none.
        """
        self._seen.wait(FIRST_FRAME_S)
        if (frame := self._frame) is None:
            raise MediaError(f"--camera {self._source}: no picture came")
        scale = min(1.0, LONGER_SIDE / max(frame.width, frame.height))
        width, height = (max(2, round(side * scale / 2) * 2) for side in (frame.width, frame.height))
        encoder = self._av.CodecContext.create("mjpeg", "w")
        encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
        encoder.time_base = Fraction(1, 25)
        packets = encoder.encode(frame.reformat(width, height, "yuvj420p"))
        return ImagePart(data=memoryview(b"".join(bytes(each) for each in [*packets, *encoder.encode()])))

    def _read(self) -> None:
        behind: float | None = None
        with self._container as container:
            try:
                for frame in container.decode(video=0):
                    at = frame.time or 0.0
                    behind = time.monotonic() - at if behind is None else behind
                    if self._closing.wait(max(0.0, at + behind - time.monotonic())):
                        break
                    self._frame = frame
                    self._seen.set()
            except self._av.FFmpegError as error:
                log.warning("the camera %s ended: %s", self._source, error)
                # An old picture would be taken for what is there now.
                self._frame = None
        self._seen.set()
