"""The answer to one request, and what it takes to go on with it at another gateway."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from omnirelay import error_codes, events
from omnirelay.client.transport.connection import Connection
from omnirelay.client.transport.outbox import UploadProgress, request_pieces
from omnirelay.client.types import ChatEvent, ChatResult, TimedDoneEvent, collect
from omnirelay.errors import (
    BusyError,
    CancelledRequestError,
    GatewayUnreachableError,
    MessageError,
    OmniRelayError,
    StageUnavailableError,
    StoppingError,
)
from omnirelay.protocol import GenerateRequest, PartialAnswer, partial_fields
from omnirelay.values import SAMPLE_BYTES

CANCELLED: Final = "the client cancelled the request"


class HeldAnswer:
    """What has arrived of an answer.

    Args:
        before: What the client had before, from its request.

    Attributes:
        request_id: The gateway's id of the last request for it; None until one was accepted.
        seed: None until a gateway has reported it.
    """

    def __init__(self, before: PartialAnswer | None) -> None:
        self.request_id: str | None = None
        self.seed: int | None = None
        self._fields: dict[str, Any] = {}
        if before is not None:
            self._add(msgspec.structs.asdict(before))
        # The one event of an answer that has nothing to speak has arrived; it counts as no chunk.
        self._spoken_nothing = False

    @property
    def begun(self) -> bool:
        """There is something that must not come twice."""
        return any(isinstance(value, list) and value for value in self._fields.values())

    def take(self, event: events.Event) -> bool:
        """Note an event; return whether it brings something new.

        Raises:
            MessageError: It is not the next one.
        """
        fields = partial_fields(event)
        self.request_id = fields.get("request_id", self.request_id)
        self.seed = fields.pop("seed", self.seed)
        new = self._check_audio(event) if isinstance(event, events.AudioEvent) else True
        self._add(fields)
        return new

    def partial(self) -> PartialAnswer | None:
        """The claim to go on; None if no gateway had accepted a request."""
        return None if self.request_id is None else PartialAnswer(**self._fields)

    def _add(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            if isinstance(value, list):
                self._fields.setdefault(name, []).extend(value)
            else:
                self._fields[name] = value

    def _check_audio(self, event: events.AudioEvent) -> bool:
        if len(event.pcm) % SAMPLE_BYTES:
            raise MessageError(f"the gateway sent {len(event.pcm)} bytes of audio, no whole samples")
        chunks = len(self._fields.get("chunk_samples", ()))
        if event.seq != chunks:
            raise MessageError(f"the gateway sent audio event {event.seq}, but {chunks} is the next")
        new = bool(event.pcm) or not self._spoken_nothing
        self._spoken_nothing |= not event.pcm
        return new


class OpenAnswer:
    """The events of one request as the client receives them; kept without limit.

    Args:
        request: Kept until the end, media included: another gateway may have to be sent it.
        on_interrupted: Called with this, why, and how long to wait, when the request ended before the answer
            and another may go on; the callee sends it again, or fails it.

    Attributes:
        request_id: The gateway's id of the request; None until it is accepted.  It changes when another
            gateway goes on with the answer.
        upload: How much of the request has been sent.
        interrupted_at: Monotonic time since which nothing has come of an answer that was interrupted.
        failures: Requests that have ended since then.
        loop: The event loop on which the answer arrives.
    """

    def __init__(
        self, request: GenerateRequest, on_interrupted: "Callable[[OpenAnswer, OmniRelayError, float], None]"
    ) -> None:
        self.upload = UploadProgress(0)
        self.interrupted_at: float | None = None
        self.failures = 0
        self._request = request
        self._on_interrupted = on_interrupted
        self._held = HeldAnswer(request.resume)
        # Every gateway so far has sent what resuming needs.
        self._resumable = True
        self._connection: Connection | None = None
        self._client_id = 0
        self._cancelled = False
        self._accepted = False
        self._sent = time.monotonic()
        self._first_text: float | None = None
        self._first_audio: float | None = None
        self._events: list[ChatEvent] = []
        self._taken = 0
        self._error: OmniRelayError | None = None
        self._ended = False
        self._arrived = asyncio.Event()
        self.loop: Final = asyncio.get_running_loop()

    @property
    def request_id(self) -> str | None:
        """The gateway's id of the request; None until it is accepted."""
        return self._held.request_id

    @property
    def ended(self) -> bool:
        """The last event, or an error, has arrived."""
        return self._ended

    @property
    def left_s(self) -> float | None:
        """Seconds until the request's deadline; None if it has none, or has ended."""
        most_s = self._request.deadline_s
        return None if most_s is None else most_s - (time.monotonic() - self._sent)

    def cancel(self) -> None:
        """Cancel the request; iterating then raises :class:`CancelledRequestError`.

        Raises:
            GatewayUnreachableError: The connection was lost.
        """
        if self._ended:
            return
        self._cancelled = True
        if self._connection is None or self._connection.cancel(self._client_id):
            self.fail(CancelledRequestError("the request was cancelled before it was sent"))

    def leave(self) -> None:
        """Cancel the request, if that is still possible: nobody waits for the answer any more."""
        with suppress(GatewayUnreachableError):
            self.cancel()

    def collect(self) -> ChatResult:
        """Join all events, those that have been iterated too."""
        return collect(self._events)

    async def next(self) -> ChatEvent | None:
        """Give the next event; None after the last.  Cancelling the task that waits cancels the request.

        Raises:
            RequestError: The request failed; subclasses say why.
            GatewayUnreachableError: The connection was lost, and no gateway could go on.
            RuntimeError: The answer arrives on another event loop.
        """
        while self._taken == len(self._events):
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            require_loop(self.loop)
            self._arrived.clear()
            try:
                await self._arrived.wait()
            except asyncio.CancelledError:
                self.leave()
                raise
        self._taken += 1
        return self._events[self._taken - 1]

    def send_on(self, connection: Connection, resumable: bool) -> None:
        """Send the request, and what has arrived of its answer.

        Args:
            resumable: Ask for what it takes to go on, if the gateway can tell.

        Raises:
            GatewayUnreachableError: There is no connection, or the gateway cannot go on with the answer.
            InvalidRequestError: As :meth:`omnirelay.AsyncClient.chat`.
        """
        resumable = resumable and connection.limits.resumes
        if self._held.begun and not (resumable and self._resumable):
            raise GatewayUnreachableError(
                f"the answer cannot go on at {connection.address}: "
                "a gateway of an earlier version took part, which does not tell what that takes"
            )
        pieces = request_pieces(self._next_request(resumable), connection.limits)
        self._client_id, self.upload = connection.submit(pieces, self)
        self._connection = connection
        self._resumable = resumable
        self._accepted = False

    def take(self, event: events.Event) -> bool:
        """Add a received event, and return whether it is the last of its request.

        Raises:
            MessageError: No gateway sends such an event.
        """
        if isinstance(event, events.ErrorEvent):
            self._refused(error_codes.from_event(event))
            return True
        if not self._held.take(event):
            return False
        elapsed = time.monotonic() - self._sent
        if isinstance(event, events.AcceptedEvent):
            self._accepted = True
            return False
        self.interrupted_at, self.failures = None, 0
        if isinstance(event, events.TextEvent):
            self._first_text = self._first_text or elapsed
        elif isinstance(event, events.AudioEvent) and event.pcm:
            self._first_audio = self._first_audio or elapsed
        if isinstance(event, events.DoneEvent):
            self._events.append(self._done(event, elapsed))
            self._end()
        elif not isinstance(event, events.CodecEvent) and not _is_empty(event):
            self._events.append(event)
        self._arrived.set()
        return self._ended

    def disconnected(self, error: OmniRelayError) -> None:
        """The connection has ended.  For the client's own use."""
        self._connection = None
        if isinstance(error, GatewayUnreachableError):
            self._interrupted(error, 0.0)
        else:
            self.fail(error)

    def fail(self, error: OmniRelayError) -> None:
        """End with an error.  For the client's own use."""
        if not self._ended:
            self._error = error
            self._end()

    def _refused(self, error: OmniRelayError) -> None:
        """Another request may go on if it was not this one's fault."""
        connection, self._connection = self._connection, None
        resuming = self.interrupted_at is not None and not self._accepted
        temporary = resuming and isinstance(error, BusyError | StageUnavailableError)
        stopped = isinstance(error, StoppingError | CancelledRequestError) and not self._cancelled
        if stopped and connection is not None:
            connection.stopping = True
        if stopped:
            # Another gateway may take it at once.
            self._interrupted(error, 0.0)
        elif temporary:
            self._interrupted(error, error.retry_after_ms / 1000 if isinstance(error, BusyError) else 0.0)
        else:
            self.fail(error)

    def _interrupted(self, error: OmniRelayError, wait_s: float) -> None:
        if self._cancelled:
            self.fail(CancelledRequestError(CANCELLED))
            return
        self.interrupted_at = self.interrupted_at or time.monotonic()
        self.failures += 1
        self._on_interrupted(self, error, wait_s)

    def _next_request(self, resumable: bool) -> GenerateRequest:
        request = self._request
        if resumable:
            request = msgspec.structs.replace(request, resumable=True)
        if self.interrupted_at is None:
            return request
        if (left_s := self.left_s) is not None:
            # If it passes just now, the gateway says so.
            request = msgspec.structs.replace(request, deadline_s=max(left_s, 0.001))
        if self._held.seed is not None:
            request = msgspec.structs.replace(request, seed=self._held.seed)
        partial = self._held.partial() or request.resume
        return msgspec.structs.replace(request, resume=partial) if resumable else request

    def _end(self) -> None:
        self._ended = True
        self._connection = None
        # Frees its media.
        self._request = GenerateRequest()
        self._arrived.set()

    def _done(self, event: events.DoneEvent, wall_s: float) -> TimedDoneEvent:
        return TimedDoneEvent(
            **msgspec.structs.asdict(event), ttft_s=self._first_text, ttfa_s=self._first_audio, wall_s=wall_s
        )


class AsyncAnswer:
    """The events of one request, to be iterated once.

    The request is cancelled when a loop over the answer is left early, when a task that waits for it is
    cancelled, as by ``asyncio.timeout``, and when the answer is no longer referenced.
    """

    def __init__(self, answer: OpenAnswer) -> None:
        self._open = answer

    def __del__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancel the request if that is still possible, from any thread, without waiting."""
        if not self._open.ended:
            # The loop may be closed.
            with suppress(RuntimeError):
                self._open.loop.call_soon_threadsafe(self._open.leave)

    @property
    def request_id(self) -> str | None:
        """The gateway's id of the request; None until it is accepted.

        It changes when another gateway goes on with the answer.
        """
        return self._open.request_id

    @property
    def ended(self) -> bool:
        """The last event, or an error, has arrived."""
        return self._open.ended

    @property
    def upload(self) -> UploadProgress:
        """How much of the request has been sent."""
        return self._open.upload

    def cancel(self) -> None:
        """Cancel the request; iterating then raises :class:`CancelledRequestError`.

        Raises:
            GatewayUnreachableError: The connection was lost.
        """
        self._open.cancel()

    async def result(self) -> ChatResult:
        """Wait for the whole answer, what has been iterated included.

        Raises:
            RequestError: The request failed.
            GatewayUnreachableError: The connection was lost, and no gateway could go on.
        """
        while await self._open.next() is not None:
            pass
        return self._open.collect()

    async def __aiter__(self) -> AsyncGenerator[ChatEvent, None]:
        """Give the events; raises as :meth:`result` does."""
        try:
            while (event := await self._open.next()) is not None:
                yield event
        finally:
            self._open.leave()

    async def __anext__(self) -> ChatEvent:
        """Give the next event; raises as :meth:`result` does."""
        if (event := await self._open.next()) is None:
            raise StopAsyncIteration
        return event


def require_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse to wait for what happens on another event loop; RuntimeError, as asyncio's."""
    if asyncio.get_running_loop() is not loop:
        raise RuntimeError(
            "the client connected on another event loop: make one for each, and close it there"
        )


def _is_empty(event: events.Event) -> bool:
    """It only says why the text has ended."""
    return isinstance(event, events.TextEvent) and not (event.token_ids or event.text)
