"""The client for plain code: the asyncio client on its own thread."""

import asyncio
import ssl
import threading
import weakref
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from omnirelay.client.aio import CLOSED, RECONNECT_S, AsyncClient
from omnirelay.client.answer import AsyncAnswer
from omnirelay.client.media import AudioSource
from omnirelay.client.player import Playback, require_player
from omnirelay.client.request import build_request, taking_options_of
from omnirelay.client.types import DEFAULT_ADDRESS, ChatEvent, ChatResult, collect
from omnirelay.errors import GatewayUnreachableError, PlayerError
from omnirelay.protocol import GenerateRequest
from omnirelay.status import StatusReport

SIGNALS_S: Final = 1.0
"""Longest delay of a Ctrl-C."""
T = TypeVar("T")


class Answer:
    """The events of one request, to be iterated once.

    The request is cancelled when a loop over the answer or a ``with`` block is left early, and when the
    answer is no longer referenced.
    """

    def __init__(self, client: "Client", answer: AsyncAnswer) -> None:
        self._client = client
        self._answer = answer

    @property
    def request_id(self) -> str | None:
        """The gateway's id of the request; None until it is accepted."""
        return self._answer.request_id

    def cancel(self) -> None:
        """Cancel the request, without waiting; iterating then raises :class:`CancelledRequestError`."""
        # The garbage collector may do this on the client's thread, which cannot wait for itself.
        self._answer.leave()

    def result(self) -> ChatResult:
        """Wait for the whole answer, what has been iterated included.

        Raises:
            RequestError: The request failed.
            GatewayUnreachableError: The connection was lost, and no gateway could go on.
        """
        return self._client.call(self._answer.result())

    def play(self) -> ChatResult:
        """Play the speech while it arrives, and wait for the end of both.

        Raises:
            PlayerError: No player is installed, or it failed; the answer is lost.
            RequestError: The request failed.
            GatewayUnreachableError: The connection was lost.
        """
        with self, Playback(require_player()) as playback:
            for event in self:
                playback.show(event)
        if playback.problem is not None:
            raise PlayerError(playback.problem)
        return self.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Generator[ChatEvent, None, None]:
        """Give the events; raises as :meth:`result` does."""
        try:
            while (event := self._next_or_none()) is not None:
                yield event
        finally:
            self.cancel()

    def __next__(self) -> ChatEvent:
        """Give the next event; raises as :meth:`result` does."""
        if (event := self._next_or_none()) is None:
            raise StopIteration
        return event

    def _next_or_none(self) -> ChatEvent | None:
        return self._client.call(self._next())

    async def _next(self) -> ChatEvent | None:
        return await anext(self._answer, None)


class Client:
    """A connection to a gateway; use it with ``with``.  Threads may share it.

    When the connection is lost, or the gateway silent, the client connects to the next address, or to the
    same, and goes on with open answers where they were.

    Args:
        address: ``tcp://HOST:PORT``, or ``tls://HOST:PORT`` if the gateway speaks TLS; or several, of which
            the first that answers is used.
        api_key: The API key, if the gateway requires one.
        ca: With ``tls://``, a CA file (PEM) or an SSL context; None is the system's trust store.
        reconnect_s: How long to try to go on after a loss; 0: answers end with their connection.

    Raises:
        GatewayUnreachableError: No gateway answers.
        VersionError: The gateway speaks another version of the protocol.
        UnauthenticatedError: Invalid API key.
        ConfigError: The address or the CA file cannot be used.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        api_key: str | None = None,
        ca: str | Path | ssl.SSLContext | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self._begin(AsyncClient(address, api_key, ca, reconnect_s))

    def _begin(self, client: AsyncClient) -> None:
        """Connect an asyncio client on a thread of its own."""
        self._client = client
        # The garbage collector may interrupt this thread, and use the client again.
        self._scheduling = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop, self._client), name="gateway-client", daemon=True
        )
        self._thread.start()
        # Also when the client is no longer referenced.
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        try:
            self.call(self._client.connect())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @taking_options_of(build_request)
    def chat(self, request: GenerateRequest) -> Answer:
        """Send a request; iterating the answer gives its events, and raises what went wrong.

        Raises:
            GatewayUnreachableError: The connection was lost.
            MediaTooLargeError: Media exceed the gateway's limits.
            InvalidRequestError: A text is not Unicode, a number exceeds 64 bits, or the request is too long.
        """

        async def send() -> AsyncAnswer:
            return self._client.chat(request)

        return Answer(self, self.call(send()))

    def transcribe(self, file: AudioSource, prompt: str | None = None, **options: Any) -> str:
        """Return what is said in a recording; as :meth:`omnirelay.AsyncClient.transcribe`."""
        return self.call(self._client.transcribe(file, prompt, **options))

    def speak(self, text: str, **options: Any) -> ChatResult:
        """Speak a text of any length as it is; options as of :meth:`omnirelay.AsyncClient.speak`.

        Raises:
            RequestError: The text is empty (``EmptyPromptError``), or a piece was refused, or failed.
            GatewayUnreachableError: The connection was lost.
        """

        async def speak() -> ChatResult:
            return collect([event async for event in self._client.speak(text, **options)])

        return self.call(speak())

    def status(self) -> StatusReport:
        """Ask for the status of the stack.

        Raises:
            GatewayUnreachableError: The connection was lost.
        """
        return self.call(self._client.status())

    def close(self) -> None:
        """Disconnect; the gateway cancels open requests, and threads that wait raise an error."""
        with self._scheduling:
            # Nothing is scheduled after this.
            self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process from which this one was forked."""
        return not (self._stop.alive and self._thread.is_alive())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's thread.  For the client's own use.

        Raises:
            GatewayUnreachableError: The client was closed, or belongs to another process.
        """
        with self._scheduling:
            if self.closed:
                work.close()
                forked = "a process that was forked needs a client of its own"
                raise GatewayUnreachableError(forked if self._stop.alive else CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            # Without a limit, CPython's wait misses a Ctrl-C that comes just before it.
            while not future.done():
                wait([future], SIGNALS_S)
            return future.result()
        finally:
            # Something else may have been raised here, such as KeyboardInterrupt.
            future.cancel()


def _serve(loop: asyncio.AbstractEventLoop, client: AsyncClient) -> None:
    """Run until the loop is stopped; then close the connection, and let waiting tasks see that."""
    loop.run_forever()
    loop.run_until_complete(client.close())
    if others := asyncio.all_tasks(loop):
        loop.run_until_complete(asyncio.wait(others))
    loop.close()
