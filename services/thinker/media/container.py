"""FFmpeg's demultiplexers, held to one file in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Final, NoReturn, Self, TypeVar

import av
from av.audio.stream import AudioStream
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from omnirelay.errors import MediaError
from services.thinker.media.formats import DEMUXERS, Format, is_frame

_Track = TypeVar("_Track", AudioStream, VideoStream)

UNREADABLE: Final = (av.FFmpegError, ValueError, LookupError, ArithmeticError, TypeError, RuntimeError)
"""What PyAV raises for data that FFmpeg cannot make sense of, and what escapes it for strange values."""

_CODECS: Final = (
    *("mp3float", "mp3", "mp2float", "mp2", "aac", "alac", "flac", "vorbis", "opus", "speex", "ac3", "eac3"),
    *("amrnb", "amrwb", "gsm_ms", "adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt", "pcm_alaw", "pcm_mulaw"),
    *("pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
    *("pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be"),
    *("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "h263", "mpeg1video", "mpeg2video"),
    *("mjpeg", "png", "prores", "theora"),
)
"""Decoders of what people record and send.  FFmpeg has hundreds more, which few have looked at."""

_MISSING_S: Final = 1.0
_MISSING_SHARE: Final = 0.05
"""A container may declare this much more than it holds: tracks end apart, a last frame is shown on."""
_ROUNDING_S: Final = 1e-3
_UNDECLARED: Final = ("mp3", "aac")
"""FFmpeg guesses how long they are, mp3 files if their encoder left no note, and ADTS frames always."""


def cut_short(what: str) -> MediaError:
    """The refusal of a file that ends too early."""
    return MediaError(f"the file is cut short: {what}; send it whole")


@contextmanager
def reading() -> Iterator[None]:
    """Turn what PyAV raises within into the refusal of the file."""
    try:
        yield
    except MemoryError:
        raise
    except UNREADABLE as error:
        reason = error.strerror if isinstance(error, av.FFmpegError) else str(error)
        raise MediaError(f"the file is damaged (FFmpeg: {reason or type(error).__name__})") from error


class MediaFile:
    """A file with tracks, which FFmpeg takes for ``form`` and nothing else; a context manager.

    Raises MediaError if FFmpeg cannot read its beginning.
    """

    def __init__(self, data: bytes, form: Format) -> None:
        self._form: Final = form
        with reading():
            self._container: Final = av.open(
                BytesIO(data),
                "r",
                format=DEMUXERS[form],
                container_options={"codec_whitelist": ",".join(_CODECS)},
                metadata_errors="replace",
                io_open=_refuse_to_open,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def sound_track(self) -> AudioStream | None:
        """The first track of sound, if any; raises MediaError at a codec that is not decoded here."""
        return next((_checked(track) for track in self._container.streams.audio), None)

    def picture_track(self) -> VideoStream:
        """The first moving pictures, no cover; raises MediaError without any that are decoded here."""
        for track in self._container.streams.video:
            if not track.disposition & Disposition.attached_pic:
                return _checked(track)
        raise MediaError("there are no moving pictures in the file")

    def declared_seconds(self, track: AudioStream | VideoStream) -> float | None:
        """How long a track is said to be, where that is written in the file and not FFmpeg's guess."""
        if self._form in _UNDECLARED:
            return None
        if self._form == "webm":
            # Matroska has no lengths of tracks.
            return self._declared_length()
        if track.duration is None or track.time_base is None:
            return None
        return float(track.duration * track.time_base)

    def packets(self, track: AudioStream | VideoStream) -> "Iterator[Packet[Any]]":
        """The packets of a track, and one without data at the end; raises MediaError at a damaged file.

        The other tracks are looked at too, so that a file that holds less than it declares is noticed.
        """
        first, last = float("inf"), float("-inf")
        with reading():
            for packet in self._container.demux():
                if packet.pts is not None and packet.time_base is not None:
                    start = float(packet.pts * packet.time_base)
                    first = min(first, start)
                    last = max(last, start + float((packet.duration or 0) * packet.time_base))
                if packet.is_corrupt and self._form in ("mp4", "webm"):
                    raise cut_short("its last packet is not whole")
                # Between and behind the frames of mp3 files stand tags, lyrics and zeros.
                filling = self._form == "mp3" and packet.size > 0 and not is_frame(bytes(packet))
                if packet.stream_index == track.index and not filling:
                    yield packet
        self._check_length(max(0.0, last - first))

    def frames(self, track: AudioStream | VideoStream) -> Iterator[Any]:
        """The decoded frames of a track; raises MediaError if the file is cut short or damaged."""
        for packet in self.packets(track):
            with reading():
                yield from packet.decode()

    def _check_length(self, seconds: float) -> None:
        if self._form in _UNDECLARED:
            return
        declared = self._declared_length() or 0.0
        missing = _ROUNDING_S if self._form == "flac" else max(_MISSING_S, _MISSING_SHARE * declared)
        if declared - seconds > missing:
            raise cut_short(f"of {declared:,.2f} s there are {seconds:,.2f} s")

    def _declared_length(self) -> float | None:
        length = self._container.duration
        if self._form == "webm" and any(stream.duration is not None for stream in self._container.streams):
            # Matroska declares lengths of the whole only: FFmpeg took those of tracks from a bit rate.
            return None
        return None if length is None else length / av.time_base


def _checked(track: _Track) -> _Track:
    # A track without a decoder has no context, whatever its type says.
    context: Any = track.codec_context
    if context is None or context.name not in _CODECS:
        raise MediaError(f"the codec of its {track.type} track is not decoded here")
    context.thread_count = 1
    return track


def _refuse_to_open(url: str, _flags: int, _options: dict[str, str]) -> NoReturn:
    # A file may name others as the place of its tracks; FFmpeg would read local files and fetch addresses.
    raise PermissionError(f"a media file may not open {url!r}")
