"""The input buffers of a session: what it hears, and what its camera has seen lately."""

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.fairness.quota import Hold
from gateway.http.encoding.encoders import wav_header
from gateway.http.encoding.matroska import Film, PictureFormat, write_matroska
from gateway.http.realtime.audio import (
    BYTES_PER_S,
    HEADER_BYTES,
    Format,
    InputDecoder,
    decoded_size,
    milliseconds,
)
from gateway.http.realtime.items import Recorded
from omnirelay.content import AudioPart, VideoPart
from omnirelay.errors import EmptyAudioError, InvalidRequestError, MediaError, MediaTooLargeError
from shared.config import MediaConfig
from shared.messages import SAMPLE_RATE

OLDEST_PART: Final = 16
"""Which part of a full buffer is forgotten at once."""


class InputAudio:
    """Appended audio, kept as a WAV file whose header is written at the end.

    Positions are in bytes, from the first that was appended in the session.

    Attributes:
        begin: Position of the first byte in the buffer.
        limit: Most bytes of it.
    """

    def __init__(self, media: MediaConfig, hold: Hold) -> None:
        self.limit: Final = min(
            int(media.max_audio_seconds * BYTES_PER_S), media.max_item_bytes - HEADER_BYTES
        )
        self.begin = 0
        self._file = bytearray(HEADER_BYTES)
        self._hold = hold
        self._decoder = InputDecoder()

    async def append(self, audio: bytes, name: Format = "audio/pcm") -> None:
        """Append audio of a format, and forget the oldest where the limit would be exceeded.

        Raises:
            MediaTooLargeError: It alone exceeds the limit; the buffer is unchanged.
            BusyError: Memory is short.
        """
        size = decoded_size(audio, name)
        if size > self.limit:
            raise MediaTooLargeError(
                f"the input audio buffer is limited to {self.limit / BYTES_PER_S:.1f} s "
                "(media.max_audio_seconds)",
                "audio",
            )
        if (excess := self.size + size - self.limit) > 0:
            # Much at once, because the rest is copied; half a sample stays.
            dropped = max(excess, self.limit // OLDEST_PART)
            self.drop(self.begin + min(dropped + dropped % 2, self.size // 2 * 2))
        self._hold.grow(size)
        for samples in self._decoder.decode(audio, name):
            self._file += samples
            # Much of it takes long to decode.
            await asyncio.sleep(0)

    @property
    def size(self) -> int:
        """Bytes of the samples."""
        return len(self._file) - HEADER_BYTES

    @property
    def end(self) -> int:
        """Position behind the last byte."""
        return self.begin + self.size

    def so_far(self, end: int | None = None) -> bytes:
        """Return a copy of the file, of whole samples; of those before a position, if one is given."""
        size = (self.size if end is None else end - self.begin) // 2 * 2
        return bytes(wav_header(size)) + bytes(memoryview(self._file)[HEADER_BYTES : HEADER_BYTES + size])

    def read(self, position: int, size: int) -> bytes:
        """Return a copy of samples that are in the buffer."""
        at = HEADER_BYTES + position - self.begin
        return bytes(memoryview(self._file)[at : at + size])

    def drop(self, position: int) -> None:
        """Forget what is before a position in the buffer."""
        size = position - self.begin
        del self._file[HEADER_BYTES : HEADER_BYTES + size]
        self._hold.shrink(size)
        self.begin = position

    def commit(self, end: int | None = None) -> tuple[bytearray, Hold]:
        """Take the samples, or those before a position, from the buffer: their file and reserved memory.

        Raises:
            EmptyAudioError: It is empty.
            InvalidRequestError: It ends within a sample.
        """
        size = self.size if end is None else end - self.begin
        if not size:
            raise EmptyAudioError("the input audio buffer is empty: append audio first")
        if size % 2:
            raise InvalidRequestError("the input audio buffer ends within a sample: samples have 16 bits")
        file, hold = self._file, self._hold
        rest = file[HEADER_BYTES + size :]
        del file[HEADER_BYTES + size :]
        self._file, self._hold = bytearray(HEADER_BYTES) + rest, hold.split(len(rest))
        self.begin += size
        file[:HEADER_BYTES] = wav_header(size)
        return file, hold

    def clear(self) -> None:
        """Empty the buffer."""
        self.begin += self.size
        self._hold.release()
        self._file = bytearray(HEADER_BYTES)
        self._decoder.clear()


MAX_FRAME_BYTES: Final = 2**20
MAX_BYTES: Final = 2**23
"""Of the frames of a session, and of those in one video."""
PATCH: Final = 28
"""Pixels of a side of what becomes a token."""
PER_S: Final = 2
"""Frames in a second of a video: as many as checkpoints look at, at most."""
LEAST_S: Final = 2
"""Seconds of a video, however large its frames are."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_END: Final = b"IEND\xaeB`\x82"
_JPEG: Final = b"\xff\xd8"
_JPEG_END: Final = b"\xff\xd9"
_JPEG_SIZES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of segments with the size of the picture (ITU-T T.81, B.1.1.3)."""
_MAX_SEGMENTS: Final = 1000
"""Before the size; a frame of empty ones would stop the gateway for tens of milliseconds."""


class Frame(NamedTuple):
    """A picture; its time is counted as the session's audio is."""

    ms: int
    data: bytes
    form: PictureFormat
    width: int
    height: int

    @property
    def tokens(self) -> int:
        """How many tokens a second of it is, if the checkpoint does not scale it down."""
        return -(-self.width // PATCH) * -(-self.height // PATCH)


class InputVideo:
    """Keeps the frames of the last seconds, in order."""

    def __init__(self, media: MediaConfig, hold: Hold) -> None:
        self._media = media
        # Of the largest file half, whose other half is for the sound.
        self._limit = min(MAX_BYTES, media.max_item_bytes // 2)
        self._hold = hold
        self._frames = deque[Frame]()

    def time_of(self, given_ms: int | None, heard_ms: int) -> int:
        """Return when a frame was taken, by default at the end of what was heard.

        Raises:
            InvalidRequestError: So much later that it would hide the frames of all that is heard next.
        """
        most = 1000 * self._media.realtime_video_seconds
        if given_ms is not None and given_ms > heard_ms + most:
            raise InvalidRequestError(
                f"time_ms is {given_ms - heard_ms} ms after the end of the appended audio, as which it is "
                f"counted; at most {most} ms are taken",
                "time_ms",
            )
        return heard_ms if given_ms is None else given_ms

    def append(self, data: bytes, ms: int) -> None:
        """Append a frame, unless there are enough of its time, or later ones.

        Raises:
            MediaError: It is neither a JPEG nor a PNG file, or not whole.
            MediaTooLargeError: It is too large.
            BusyError: Memory is short.
        """
        frame = self._check(data, ms)
        if self._frames and self._period(ms) <= self._period(self._frames[-1].ms):
            return
        while self._frames and (
            self._is_old(self._frames[0], ms) or self._hold.size + len(data) > self._limit
        ):
            self._hold.shrink(len(self._frames.popleft().data))
        self._hold.grow(len(data))
        self._frames.append(frame)

    def clear(self) -> None:
        """Forget all frames."""
        self._frames.clear()
        self._hold.release()

    def sees(self, ms: int) -> bool:
        """Whether there is a frame of the last seconds before a time."""
        return bool(self._until(ms))

    def recorded(self, wav: memoryview, begin_ms: int) -> Recorded:
        """Return a recording that began at a time, with what was seen meanwhile.

        Args:
            wav: Its file, as :class:`gateway.http.realtime.input_buffers.InputAudio` makes it.
        """
        pcm = wav[HEADER_BYTES:]
        frames = self._until(begin_ms + milliseconds(len(pcm)))
        if not frames:
            return Recorded([AudioPart(data=wav)])
        seconds = max(1, -(-len(pcm) // BYTES_PER_S))
        shown = _shown(frames, [begin_ms + 1000 * at // PER_S for at in range(PER_S * seconds)])
        left = self._too_long_ago(shown, seconds)
        shown = shown[PER_S * left :]
        head, tail = pcm[: left * BYTES_PER_S], pcm[left * BYTES_PER_S :]
        form, width, height = shown[0].form, shown[0].width, shown[0].height
        film = Film(form, [each.data for each in shown], width, height, PER_S, tail, SAMPLE_RATE)
        video = VideoPart(data=memoryview(write_matroska(film)))
        before = [AudioPart(data=memoryview(wav_header(len(head)) + head))] if head else []
        return Recorded([*before, video], (seconds - left) * max(frame.tokens for frame in shown))

    def _check(self, data: bytes, ms: int) -> Frame:
        if not self._media.max_videos:
            raise MediaTooLargeError("this gateway takes no videos (media.max_videos)", "type")
        if len(data) > (largest := min(MAX_FRAME_BYTES, self._limit // (PER_S * LEAST_S))):
            raise MediaTooLargeError(f"the frame has {len(data)} bytes, the limit is {largest}", "image")
        frame = Frame(ms, data, *_read_size(data))
        if frame.tokens > (most := self._media.realtime_video_tokens // LEAST_S):
            raise MediaTooLargeError(
                f"the frame has {frame.width} by {frame.height} pixels, which are {frame.tokens} tokens a "
                f"second, the limit is {most} (half of media.realtime_video_tokens): send smaller ones",
                "image",
            )
        return frame

    def _until(self, ms: int) -> list[Frame]:
        """The frames of the last seconds before a time, in the format of the newest."""
        found = [frame for frame in list(self._frames) if frame.ms <= ms and not self._is_old(frame, ms)]
        return [frame for frame in found if frame.form == found[-1].form]

    def _is_old(self, frame: Frame, ms: int) -> bool:
        return frame.ms < ms - 1000 * self._media.realtime_video_seconds

    def _period(self, ms: int) -> int:
        return int(ms * self._media.realtime_fps / 1000)

    def _too_long_ago(self, shown: Sequence[Frame], seconds: int) -> int:
        """How many seconds of what would be shown exceed a limit."""
        tokens = max(frame.tokens for frame in shown)
        media = self._media
        sound = media.max_item_bytes // 2 // BYTES_PER_S
        longest = min(media.realtime_video_seconds, int(media.max_video_seconds), sound)
        left = max(0, seconds - max(1, min(longest, media.realtime_video_tokens // tokens)))
        while seconds - left > LEAST_S and sum(len(one.data) for one in shown[PER_S * left :]) > self._limit:
            left += 1
        return left


def _shown(frames: Sequence[Frame], times: Sequence[int]) -> list[Frame]:
    """For each time the newest frame that is not later; before the first frame, the first."""
    shown, at = [], 0
    for time in times:
        while at + 1 < len(frames) and frames[at + 1].ms <= time:
            at += 1
        shown.append(frames[at])
    return shown


def _read_size(data: bytes) -> tuple[PictureFormat, int, int]:
    """Format, width and height of a picture; the thinker checks them again when it decodes it.

    Raises:
        MediaError: It is neither a JPEG nor a PNG file, or not whole.
    """
    found: tuple[PictureFormat, int, int] | None = None
    try:
        if data.startswith(_PNG) and data.endswith(_PNG_END):
            found = ("png", *struct.unpack_from(">II", data, 16))
        elif data.startswith(_JPEG) and data.endswith(_JPEG_END):
            height, width = struct.unpack_from(">HH", data, _jpeg_size(data))
            found = ("jpeg", width, height)
    except struct.error:
        found = None
    if found is None or not all(found[1:]):
        raise MediaError("the frame must be a whole JPEG or PNG file", "image")
    return found


def _jpeg_size(data: bytes) -> int:
    """Where height and width are; of no use if the file is damaged."""
    at = len(_JPEG)
    for _ in range(_MAX_SEGMENTS):
        mark, kind, length = struct.unpack_from(">BBH", data, at)
        if mark != 0xFF or length < 2:
            raise struct.error
        if kind in _JPEG_SIZES:
            return at + 5
        at += 2 + length
    raise struct.error
