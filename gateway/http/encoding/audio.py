"""Encoders on threads of their own."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gateway.http.encoding.encoders import AudioFormat, Encoder, make_encoder

THREADS: Final = 2
"""The encoding libraries release the interpreter lock."""
PLAIN: Final = frozenset({"wav", "pcm16"})
"""Formats without a library: a chunk takes less time than handing it to a thread."""
PLAIN_BYTES: Final = 2**18
"""Most samples that are converted on the event loop; these take it 0.2 ms."""


class AudioPool:
    """The threads on which speech is encoded."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "audio")

    def start(
        self, name: AudioFormat, streamed: bool, base64: bool = False, speed: float = 1.0
    ) -> "EncodedAudio":
        """Start a file; the arguments are those of :func:`gateway.http.encoding.encoders.make_encoder`."""
        return EncodedAudio(self._threads, name, streamed, base64, speed)

    def close(self) -> None:
        """Stop encoding."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class EncodedAudio:
    """An encoder that works on a thread, or on the event loop where that is quicker; one call at a time."""

    def __init__(
        self, threads: ThreadPoolExecutor, name: AudioFormat, streamed: bool, base64: bool, speed: float
    ) -> None:
        self._threads = threads
        self._how = (name, streamed, base64, speed)
        self._plain = name in PLAIN and speed == 1
        self._encoder: Encoder | None = None

    async def push(self, pcm: bytes) -> bytes:
        """Encode; see :meth:`gateway.http.encoding.encoders.Encoder.push`."""
        # The first call may load a library.
        if self._encoder is not None and self._plain and len(pcm) <= PLAIN_BYTES:
            return self._encoder.push(pcm)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._opened().push(pcm)
        )

    async def finish(self) -> bytes:
        """End the file, and return the rest of it."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._opened().finish()
        )

    def _opened(self) -> Encoder:
        # On the thread, since it may load a library.
        if self._encoder is None:
            self._encoder = make_encoder(*self._how)
        return self._encoder
