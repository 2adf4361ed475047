"""Encoders on threads of their own, so that the event loop goes on."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gateway.http.encoding.encoders import AudioFormat, Encoder, make_encoder

THREADS: Final = 2
"""Encoders that work at once; the libraries release the interpreter meanwhile."""


class AudioPool:
    """The threads on which speech is encoded."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "audio")

    def start(self, name: AudioFormat, streamed: bool, base64: bool = False) -> "EncodedAudio":
        """Start a file; the arguments are those of :func:`gateway.http.encoding.encoders.make_encoder`."""
        return EncodedAudio(self._threads, name, streamed, base64)

    def close(self) -> None:
        """Encode no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class EncodedAudio:
    """One file.  A piece must have come back before the next one is given.

    Args:
        threads: Where the work is done.
        name: The format.
        streamed: See :func:`gateway.http.encoding.encoders.make_encoder`.
        base64: See there.
    """

    def __init__(self, threads: ThreadPoolExecutor, name: AudioFormat, streamed: bool, base64: bool) -> None:
        self._threads = threads
        self._how = (name, streamed, base64)
        self._encoder: Encoder | None = None

    async def push(self, pcm: bytes) -> bytes:
        """Take the next piece of the waveform: float32, little-endian, mono, 24,000 samples a second.

        Returns:
            What can be sent of the file.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._push, pcm)

    async def finish(self) -> bytes:
        """End the file.

        Returns:
            The rest of it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._finish)

    def _push(self, pcm: bytes) -> bytes:
        return self._made().push(pcm)

    def _finish(self) -> bytes:
        return self._made().finish()

    def _made(self) -> Encoder:
        """The encoder; libraries are loaded here too, beside the event loop."""
        if self._encoder is None:
            self._encoder = make_encoder(*self._how)
        return self._encoder
