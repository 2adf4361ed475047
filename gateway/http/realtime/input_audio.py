"""What a user is saying: samples that come piece by piece, until they are an item."""

from typing import Final

from gateway.fairness.memory_budget import ClientBudget, Hold
from gateway.http.realtime.items import BYTES_PER_S, HEADER_BYTES, wav_header
from omnirelay.errors import InvalidRequestError, MediaTooLargeError
from shared.config import MediaConfig


class InputAudio:
    """The input audio buffer, from the beginning a WAV file without its header's numbers.

    Args:
        media: What is allowed.
        held: Where bytes are counted.
    """

    def __init__(self, media: MediaConfig, held: ClientBudget) -> None:
        self._held = held
        self._limit: Final = min(
            int(media.max_audio_seconds * BYTES_PER_S), media.max_item_bytes - HEADER_BYTES
        )
        self._file = bytearray(HEADER_BYTES)
        self._hold = Hold(held)

    def append(self, samples: bytes) -> None:
        """Take more samples.

        Args:
            samples: int16, little-endian, mono, 24,000 a second.

        Raises:
            MediaTooLargeError: It would be longer than allowed; what was there stays.
            BusyError: There is no room.
        """
        size = len(self._file) - HEADER_BYTES + len(samples)
        if size > self._limit:
            raise MediaTooLargeError(
                f"the input audio buffer would hold more than {self._limit / BYTES_PER_S:.1f} s, "
                "no more are taken (media.max_audio_seconds)",
                "audio",
            )
        self._hold.grow(len(samples))
        self._file += samples

    def commit(self) -> tuple[bytearray, Hold]:
        """Give the file, and what is counted for it; the buffer is empty then.

        Raises:
            InvalidRequestError: There is nothing, or half a sample at the end.
        """
        size = len(self._file) - HEADER_BYTES
        if not size:
            raise InvalidRequestError("the input audio buffer is empty: append audio first")
        if size % 2:
            raise InvalidRequestError("the input audio buffer ends within a sample: samples have 16 bits")
        file, hold = self._file, self._hold
        self._file, self._hold = bytearray(HEADER_BYTES), Hold(self._held)
        file[:HEADER_BYTES] = wav_header(size)
        return file, hold

    def clear(self) -> None:
        """Forget what came."""
        self._hold.release()
        self._file = bytearray(HEADER_BYTES)
