"""Incremental encoders, on threads of their own: what one returns, joined, is a file."""

import asyncio
import binascii
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from gateway.http.encoding.tempo import Tempo
from omnirelay.errors import UnsupportedFormatError
from shared.messages import SAMPLE_RATE

AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
FORMATS: Final[tuple[AudioFormat, ...]] = get_args(AudioFormat)
CONTENT_TYPES: Final[dict[AudioFormat, str]] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
    "pcm16": "audio/pcm",
}
UNKNOWN_SIZE: Final = 2**32 - 1
"""The length in the header of a WAV file that is still being written."""
BASE64_PIECE: Final = 3 * 2**17
"""Bytes converted in one call, which blocks all other threads."""
ONE_SAMPLE: Final = bytes(4)
"""Silence: compressed files without any sample cannot be opened."""
AAC_BITS_PER_S: Final = 64_000
SET_OGG_PAGE_LATENCY_MS: Final = 0x1302
"""``SFC_SET_OGG_PAGE_LATENCY_MS`` of sndfile.h."""
OGG_PAGE_MS: Final = 60.0
"""Length of an Ogg page; libsndfile's default delays speech by a second."""


class Encoder(Protocol):
    """Encodes one file."""

    def push(self, pcm: bytes) -> bytes:
        """Encode samples, and return what is complete of the file.

        Args:
            pcm: float32 in [-1, 1], little-endian, mono, at :data:`shared.messages.SAMPLE_RATE`.
        """
        ...

    def finish(self) -> bytes:
        """End the file, and return the rest of it."""
        ...


def require_format(name: AudioFormat, param: str) -> None:
    """Check that a format, given in the field ``param``, is available.

    Raises:
        UnsupportedFormatError: Its library is not installed.
    """
    if name == "aac" and find_spec("av") is None:
        raise UnsupportedFormatError(
            "aac needs PyAV, which is not installed on the gateway (pip install av); "
            "wav, mp3, flac, opus and pcm16 do not",
            param,
        )


def make_encoder(name: AudioFormat, streamed: bool, base64: bool = False, speed: float = 1.0) -> Encoder:
    """Start a file.

    A streamed one is returned as soon as possible, else all at the end, with the length in its header.  Each
    piece of base64 can be decoded by itself.  A ``speed`` other than 1, from 0.25 to 4, needs PyAV.
    """
    makers: dict[AudioFormat, Callable[[], Encoder]] = {
        "wav": partial(_WavEncoder, streamed),
        "mp3": partial(_SoundFileEncoder, streamed, "MP3", "MPEG_LAYER_III", 0.5, "CONSTANT"),
        "flac": partial(_SoundFileEncoder, streamed, "FLAC", "PCM_16"),
        "opus": partial(_SoundFileEncoder, streamed, "OGG", "OPUS", 0.8),
        "aac": _AacEncoder,
        "pcm16": _Pcm16Encoder,
    }
    encoder = makers[name]()
    if speed != 1:
        encoder = _TempoEncoder(encoder, speed)
    return _Base64Encoder(encoder) if base64 else encoder


class _Pcm16Encoder:
    """Raw 16-bit samples, little-endian."""

    def push(self, pcm: bytes) -> bytes:
        return to_int16(pcm).tobytes()

    def finish(self) -> bytes:
        return b""


class _WavEncoder:
    """WAV with 16-bit samples; a streamed one leaves the length open."""

    def __init__(self, streamed: bool) -> None:
        self._kept: bytearray | None = None if streamed else bytearray()
        self._begun = False

    def push(self, pcm: bytes) -> bytes:
        samples = to_int16(pcm).tobytes()
        if self._kept is not None:
            self._kept += samples
            return b""
        return self._header_once() + samples

    def finish(self) -> bytes:
        return self._header_once() if self._kept is None else wav_header(len(self._kept)) + self._kept

    def _header_once(self) -> bytes:
        begun, self._begun = self._begun, True
        return b"" if begun else wav_header(UNKNOWN_SIZE)


class _SoundFileEncoder:
    """A format of libsndfile; a streamed file lacks what would be written to its header at the end.

    With the bitrate mode ``CONSTANT`` players can tell the length of a stream without a table in its header.
    """

    def __init__(
        self,
        streamed: bool,
        container: str,
        codec: str,
        compression: float | None = None,
        bitrate_mode: str | None = None,
    ) -> None:
        import soundfile  # noqa: PLC0415 - loaded on first use

        self._streamed = streamed
        self._sink = _Sink()
        self._whole_numbers = codec == "PCM_16"
        self._empty = True
        self._file: Any = soundfile.SoundFile(
            self._sink,
            "w",
            SAMPLE_RATE,
            1,
            codec,
            format=container,
            compression_level=compression,
            bitrate_mode=bitrate_mode,
        )
        if container == "OGG":
            # The library has no public API for it.
            latency = soundfile._ffi.new("double*", OGG_PAGE_MS)
            soundfile._snd.sf_command(self._file._file, SET_OGG_PAGE_LATENCY_MS, latency, 8)

    def push(self, pcm: bytes) -> bytes:
        self._empty &= not pcm
        self._file.write(to_int16(pcm) if self._whole_numbers else _to_float32(pcm))
        return self._sink.take() if self._streamed else b""

    def finish(self) -> bytes:
        begun = self.push(ONE_SAMPLE) if self._empty else b""
        self._file.close()
        return begun + self._sink.take()


class _AacEncoder:
    """AAC in ADTS frames, by FFmpeg."""

    def __init__(self) -> None:
        import av  # noqa: PLC0415 - large and optional

        self._av = av
        self._sink = _Sink()
        self._container = av.open(self._sink, "w", format="adts")
        self._stream = self._container.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        self._stream.bit_rate = AAC_BITS_PER_S
        self._samples = 0

    def push(self, pcm: bytes) -> bytes:
        samples = _to_float32(pcm)
        if samples.size:
            frame = self._av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = SAMPLE_RATE, self._samples
            self._samples += samples.size
            self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def finish(self) -> bytes:
        begun = b"" if self._samples else self.push(ONE_SAMPLE)
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return begun + self._sink.take()


class _TempoEncoder:
    """Speech of another speed, in another encoder's format."""

    def __init__(self, encoder: Encoder, speed: float) -> None:
        self._encoder = encoder
        self._tempo = Tempo(speed)

    def push(self, pcm: bytes) -> bytes:
        return self._encoder.push(self._tempo.push(_to_float32(pcm)).tobytes())

    def finish(self) -> bytes:
        last = self._encoder.push(self._tempo.finish().tobytes())
        return last + self._encoder.finish()


class _Base64Encoder:
    """Base64 of another encoder's output, cut where no padding is needed."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._rest = b""

    def push(self, pcm: bytes) -> bytes:
        data = self._rest + self._encoder.push(pcm)
        whole = len(data) // 3 * 3
        self._rest = data[whole:]
        return _base64(data[:whole])

    def finish(self) -> bytes:
        return _base64(self._rest + self._encoder.finish())


class _Sink:
    """A file in memory from which data are taken; what is written to that part later is lost."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._taken = 0
        self._position = 0

    def take(self) -> bytes:
        data = bytes(self._data)
        self._taken += len(data)
        self._data.clear()
        return data

    def write(self, data: Any) -> int:
        piece = bytes(data)
        start = self._position - self._taken
        self._position += len(piece)
        if start >= 0:
            self._data[start : start + len(piece)] = piece
        return len(piece)

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, self._taken + len(self._data))[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return nothing; libsndfile only requires the method."""
        del size
        return b""


def to_int16(pcm: bytes) -> NDArray[np.int16]:
    """Convert float32 samples to 16 bits, little-endian, and clip them to [-1, 1]."""
    # In place: copies of each step would take three times as long.
    samples = np.clip(np.frombuffer(pcm, "<f4"), -1.0, 1.0)
    samples *= 32767
    np.rint(samples, out=samples)
    if np.isnan(samples).any():
        np.nan_to_num(samples, copy=False)
    return samples.astype("<i2")


def _to_float32(pcm: bytes) -> NDArray[np.float32]:
    return np.clip(np.nan_to_num(np.frombuffer(pcm, "<f4")), -1.0, 1.0)


def wav_header(size: int) -> bytes:
    """Build the header of a WAV file with ``size`` bytes of 16-bit samples."""
    riff = min(size + 36, UNKNOWN_SIZE)
    shape = struct.pack("<IHHIIHH", 16, 1, 1, SAMPLE_RATE, 2 * SAMPLE_RATE, 2, 16)
    return struct.pack("<4sI8s", b"RIFF", riff, b"WAVEfmt ") + shape + struct.pack("<4sI", b"data", size)


def _base64(data: bytes) -> bytes:
    pieces = (data[start : start + BASE64_PIECE] for start in range(0, len(data), BASE64_PIECE))
    return b"".join(binascii.b2a_base64(piece, newline=False) for piece in pieces)


THREADS: Final = 2
"""The encoding libraries release the interpreter lock."""
PLAIN: Final = frozenset({"wav", "pcm16"})
"""Formats without a library: a chunk takes less time than handing it to a thread."""
PLAIN_BYTES: Final = 2**18
"""Most samples that are converted on the event loop; these take it 0.2 ms."""


def audio_threads() -> ThreadPoolExecutor:
    """Make the threads on which speech is encoded."""
    return ThreadPoolExecutor(THREADS, "audio")


class EncodedAudio:
    """An encoder that works on a thread, or on the event loop where that is quicker; one call at a time.

    Args:
        threads: Those of :func:`audio_threads`.
        name: The format; this and what follows are as for :func:`make_encoder`.
    """

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        name: AudioFormat,
        streamed: bool,
        base64: bool = False,
        speed: float = 1.0,
    ) -> None:
        self._threads = threads
        self._make = partial(make_encoder, name, streamed, base64, speed)
        self._plain = name in PLAIN and speed == 1

    @cached_property
    def _encoder(self) -> Encoder:
        """Made at first use: on the thread if it may load a library."""
        return self._make()

    async def push(self, pcm: bytes) -> bytes:
        """Encode; see :meth:`gateway.http.encoding.encoders.Encoder.push`."""
        if self._plain and len(pcm) <= PLAIN_BYTES:
            return self._encoder.push(pcm)
        return await self._on_thread(lambda encoder: encoder.push(pcm))

    async def finish(self) -> bytes:
        """End the file, and return the rest of it."""
        return await self._on_thread(lambda encoder: encoder.finish())

    async def _on_thread(self, work: Callable[[Encoder], bytes]) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(self._encoder))
