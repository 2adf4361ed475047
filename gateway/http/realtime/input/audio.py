"""The input audio buffer of a session."""

import asyncio
from typing import Final

from gateway.fairness.quota import Hold
from gateway.http.encoding.encoders import wav_header
from gateway.http.realtime.items import BYTES_PER_S, HEADER_BYTES
from gateway.http.realtime.speech import Format, InputDecoder, decoded_size
from omnirelay.errors import EmptyAudioError, InvalidRequestError, MediaTooLargeError
from shared.config import MediaConfig

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

    async def append(self, audio: bytes, name: Format = "audio/pcm", rolling: bool = False) -> None:
        """Append audio of a format.

        Args:
            rolling: Forget the oldest audio where the limit would be exceeded.

        Raises:
            MediaTooLargeError: The limit is exceeded; the buffer is unchanged.
            BusyError: Memory is short.
        """
        size = decoded_size(audio, name)
        excess = self.size + size - self.limit
        if excess > 0 and rolling and size <= self.limit:
            # Much at once, because the rest is copied.
            dropped = max(excess, self.limit // OLDEST_PART)
            self.drop(self.begin + min(dropped + dropped % 2, self.size // 2 * 2))
        if self.size + size > self.limit:
            raise MediaTooLargeError(
                f"the input audio buffer is limited to {self.limit / BYTES_PER_S:.1f} s "
                "(media.max_audio_seconds)",
                "audio",
            )
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
