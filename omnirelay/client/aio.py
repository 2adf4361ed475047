"""The asyncio client: any number of concurrent requests over one connection, replaced when it is lost."""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Self

from omnirelay.client.answer import AsyncAnswer, OpenAnswer, require_loop
from omnirelay.client.media import AudioSource
from omnirelay.client.request import build_request, taking_options_of, transcription
from omnirelay.client.transport.connection import Connection
from omnirelay.client.types import DEFAULT_ADDRESS, ChatEvent
from omnirelay.errors import (
    ConfigError,
    DeadlineError,
    EmptyPromptError,
    GatewayUnreachableError,
    OmniRelayError,
)
from omnirelay.protocol import GenerateRequest
from omnirelay.reading import growing_pieces, one_ahead
from omnirelay.status import StatusReport

RECONNECT_S: Final = 60.0
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 2.0
"""Between two rounds over the addresses; pauses double."""
MAX_FAILURES: Final = 50
"""Requests that may end one after the other without bringing anything of an answer."""
CLOSED: Final = "the client was closed"
log = logging.getLogger(__name__)


class AsyncClient:
    """A connection to a gateway; use it with ``async with``.

    When the connection is lost, or the gateway silent, the client connects to the next address, or to the
    same, and goes on with open answers where they were.

    Args:
        address: ``tcp://HOST:PORT``, or ``tls://HOST:PORT`` if the gateway speaks TLS; or several, of which
            the first that answers is used.
        api_key: The API key, if the gateway requires one.
        ca: With ``tls://``, a CA file (PEM) or an SSL context; None is the system's trust store.
        reconnect_s: How long to try to go on after a loss; 0: answers end with their connection.

    Raises:
        ConfigError: There is no address, or a CA file without an address of TLS.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        api_key: str | None = None,
        ca: str | Path | ssl.SSLContext | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.addresses: Final = (address,) if isinstance(address, str) else tuple(address)
        if not self.addresses:
            raise ConfigError("the client needs the address of a gateway")
        if ca is not None and not any(each.startswith("tls:") for each in self.addresses):
            # Whoever names an authority counts on TLS.
            raise ConfigError(f"ca, or --ca, is for tls://HOST:PORT, not for {', '.join(self.addresses)}")
        self._api_key = api_key
        self._ca = ca
        self._reconnect_s = reconnect_s
        # The one for new requests; others end with theirs.
        self._connection: Connection | None = None
        self._connections: set[Connection] = set()
        self._finding: asyncio.Task[Connection] | None = None
        self._interrupted: set[OpenAnswer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """The gateway's address; the first one before there is a connection."""
        return self._connection.address if self._connection is not None else self.addresses[0]

    async def connect(self) -> None:
        """Connect to the first gateway that answers.

        Raises:
            GatewayUnreachableError: None answers.
            VersionError: The gateway speaks another version of the protocol.
            UnauthenticatedError: Invalid API key.
            ConfigError: An address or the CA file cannot be used.
        """
        found = await self._try_all(self.addresses)
        if isinstance(found, Connection):
            return
        # A retry cannot mend these.
        grave = next((each for each in found if not isinstance(each, GatewayUnreachableError)), None)
        if grave is not None or len(found) == 1:
            raise grave or found[0]
        raise GatewayUnreachableError("; ".join(map(str, found)))

    async def close(self) -> None:
        """Disconnect; the gateway cancels requests that have not ended."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *filter(None, [self._finding])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in list(self._connections)))
        self._connections.clear()
        for answer in self._interrupted:
            answer.fail(GatewayUnreachableError(CLOSED))
        self._interrupted.clear()

    @taking_options_of(build_request)
    def chat(self, request: GenerateRequest) -> AsyncAnswer:
        """Send a request; iterating the answer gives its events, and raises what went wrong.

        Files are read, and samples and pixels encoded, before this returns.  Encode large media in a thread:
        ``await asyncio.to_thread(video, frames, fps=2.0)``.

        Raises:
            GatewayUnreachableError: There is no connection.
            MediaTooLargeError: Media exceed the gateway's limits.
            InvalidRequestError: A text is not Unicode, a number exceeds 64 bits, or the request is too long.
        """
        connection = self._connected()
        answer = OpenAnswer(request, self._on_interrupted)
        if connection.usable or self._closed or not self._reconnect_s:
            answer.send_on(connection, resumable=self._reconnect_s > 0)
        else:
            answer.disconnected(GatewayUnreachableError(str(connection.ended or "the gateway is stopping")))
        return AsyncAnswer(answer)

    async def transcribe(self, file: AudioSource, prompt: str | None = None, **options: Any) -> str:
        """Return what is said in a recording.

        Args:
            file: A source of audio, as in :meth:`chat`.
            prompt: Text of a system message, such as names that occur.
            options: Options of :meth:`chat` for the text.

        Raises:
            OmniRelayError: As :meth:`chat` and its answer do.
        """
        return (await self.chat(transcription(file, prompt, **options)).result()).text

    def speak(
        self,
        text: str | AsyncIterable[str],
        *,
        voice: str | None = None,
        speaker: str | None = None,
        system: str | None = None,
        seed: int | None = None,
    ) -> AsyncGenerator[ChatEvent, None]:
        """Speak a text of any length as it is: events of its pieces, sentences, one after the other.

        Args:
            text: The text, or its parts as they come: a piece is begun as soon as it is complete.
            voice: Name of the voice.
            speaker: The same.
            system: Text of a system message, such as how to speak.
            seed: Makes the speech repeatable.

        Raises:
            EmptyPromptError: The text is empty, or only space.
            OmniRelayError: As iterating the answer to :meth:`chat` does.
        """

        async def answers() -> AsyncGenerator[AsyncAnswer, None]:
            said = ""
            async for piece in growing_pieces(_parts(text) if isinstance(text, str) else text):
                if stripped := piece.strip():
                    said = stripped
                    yield self.chat(say=said, voice=voice, speaker=speaker, system=system, seed=seed)
            if not said:
                raise EmptyPromptError("the text to be spoken is empty", "text")

        return one_ahead(answers(), AsyncAnswer.cancel)

    async def status(self) -> StatusReport:
        """Ask for the status of the stack.

        Raises:
            GatewayUnreachableError: The connection was lost.
        """
        connection = self._connected()
        if connection.ended is not None and self._reconnect_s and not self._closed:
            connection = await self._usable()
        return await connection.status()

    def _connected(self) -> Connection:
        if self._connection is None:
            raise GatewayUnreachableError("the client is not connected")
        require_loop(self._connection.loop)
        return self._connection

    async def _try_all(self, addresses: Sequence[str]) -> Connection | list[OmniRelayError]:
        """Connect to the first address that answers; else return why none does."""
        errors: list[OmniRelayError] = []
        for address in addresses:
            connection = Connection(address, self._api_key, self._ca, self._on_ended)
            try:
                await connection.connect()
            except OmniRelayError as error:
                log.debug("cannot use %s: %s", address, error)
                errors.append(error)
            else:
                if self._closed:
                    await connection.close()
                    raise GatewayUnreachableError(CLOSED)
                self._connection = connection
                self._connections.add(connection)
                return connection
        return errors

    async def _find(self) -> Connection:
        """Connect again: to the next address first, in rounds, with pauses.

        Raises:
            GatewayUnreachableError: No gateway answered in time.
            OmniRelayError: All answer, and refuse this client.
        """
        began = time.monotonic()
        first = self.addresses.index(self.address) + 1
        order = [*self.addresses[first:], *self.addresses[:first]]
        rounds = 0
        while True:
            found = await self._try_all(order)
            if isinstance(found, Connection):
                log.info("connected to %s", found.address)
                return found
            rounds += 1
            if not any(isinstance(each, GatewayUnreachableError) for each in found):
                raise found[0]
            pause_s = _pause_s(rounds)
            if time.monotonic() + pause_s > began + self._reconnect_s:
                raise GatewayUnreachableError(
                    f"no gateway could be reached within {self._reconnect_s:g} s; tried {rounds} times: "
                    + "; ".join(map(str, found))
                )
            await asyncio.sleep(pause_s)

    async def _usable(self) -> Connection:
        """The connection for new requests, a new one if need be; raises as :meth:`_find` does."""
        if self._connection is not None and self._connection.usable:
            return self._connection
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._find())
        # Not awaited itself: who waits for it is not cancelled because a close has cancelled it.
        await asyncio.wait([finding := self._finding])
        if finding.cancelled():
            raise GatewayUnreachableError(CLOSED)
        return finding.result()

    async def _go_on(self, answer: OpenAnswer, error: OmniRelayError, wait_s: float) -> None:
        """Send an interrupted request again."""
        pause_s = max(wait_s, _pause_s(answer.failures - 1) if answer.failures > 1 else 0.0)
        late = (answer.interrupted_at or 0.0) + self._reconnect_s
        try:
            if time.monotonic() + pause_s > late or answer.failures > MAX_FAILURES:
                raise GatewayUnreachableError(
                    f"the answer was interrupted, and could not go on: tried {answer.failures} times "
                    f"within {self._reconnect_s:g} s at {', '.join(self.addresses)}; the last time: {error}"
                )
            async with asyncio.timeout(answer.left_s):
                await asyncio.sleep(pause_s)
                connection = await self._usable()
            self._interrupted.discard(answer)
            if connection.ended is not None:
                answer.disconnected(connection.ended)
            elif not answer.ended:
                answer.send_on(connection, resumable=True)
        except (OmniRelayError, TimeoutError) as problem:
            self._interrupted.discard(answer)
            passed = DeadlineError("the request's deadline passed while its answer was interrupted")
            answer.fail(problem if isinstance(problem, OmniRelayError) else passed)

    def _on_ended(self, connection: Connection) -> None:
        if connection in self._connections and not self._closed:
            self._start(self._drop(connection))

    async def _drop(self, connection: Connection) -> None:
        await connection.close()
        self._connections.discard(connection)

    def _on_interrupted(self, answer: OpenAnswer, error: OmniRelayError, wait_s: float) -> None:
        if self._closed or not self._reconnect_s:
            answer.fail(GatewayUnreachableError(CLOSED) if self._closed else error)
            return
        log.debug("an answer was interrupted: %s", error)
        self._interrupted.add(answer)
        self._start(self._go_on(answer, error, wait_s))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _pause_s(failures: int) -> float:
    """How long to wait after so many failures, randomly shortened so that clients spread."""
    longest = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


async def _parts(text: str) -> AsyncGenerator[str, None]:
    yield text
