"""What the endpoints share."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import HTTPConnection

from gateway.access.access import Access
from gateway.access.account import ClientAccount
from gateway.fairness.thread import FairThread
from gateway.fairness.uploads import UploadRoom
from gateway.http.encoding.encoders import audio_threads
from gateway.http.guards import REQUEST_ID, client_of
from gateway.manager import Gateway
from omnirelay.errors import OmniRelayError, UnknownModelError
from omnirelay.status import StatusReport
from shared.config import Config

ALIAS: Final = "omnirelay"
"""A name for whichever model is served."""


@dataclass(frozen=True)
class HttpContext:
    """The parts of the gateway that the HTTP servers use.

    Attributes:
        gateway: Serves requests.
        config: The configuration of the stack.
        status: Returns the state of the stack.
        uploads: Memory for large bodies, shared with the other servers.
        access: Authenticates and limits clients.
        model: The public name of the served model.
        starters: Typed questions that the checkpoint brings for people who try it.
        random_weights: The checkpoint is untrained: its answers mean nothing.
        audio: The threads on which speech is encoded.
        parsing: Parses what is large: one thread, or several together would keep the event loop waiting.
        started: Unix time at which the gateway started.
        calls: The tasks of calls, which outlive the requests that begin them; cancelled at shutdown.
    """

    gateway: Gateway
    config: Config
    status: Callable[[], StatusReport]
    uploads: UploadRoom
    access: Access
    model: str
    starters: Sequence[str] = ()
    random_weights: bool = False
    audio: ThreadPoolExecutor = field(default_factory=audio_threads)
    parsing: FairThread = field(default_factory=lambda: FairThread("parsing"))
    started: int = field(default_factory=lambda: int(time.time()))
    calls: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def max_text_tokens(self) -> int:
        """Most tokens of an answer's text."""
        return self.config.gateway.limits.max_text_tokens

    @property
    def max_item_bytes(self) -> int:
        """Most bytes of one file."""
        return self.config.media.max_item_bytes

    def account(self, request: HTTPConnection) -> ClientAccount:
        """Open an account for one HTTP request or WebSocket."""
        return self.access.account(f"HTTP client {request.scope[REQUEST_ID]}", client_of(request.scope))

    def share(self, request: HTTPConnection) -> str:
        """Return the holder under which a client's use of shared memory is counted."""
        return self.access.share(client_of(request.scope), request.client.host if request.client else "")

    def told(self, error: OmniRelayError) -> None:
        """Count an error that is sent to a client."""
        self.gateway.metrics.told("http", error.code)

    def require_model(self, name: str) -> None:
        """Check the model of a request.

        Raises:
            UnknownModelError: It is not served.
        """
        if name not in {self.model, ALIAS, *self.config.gateway.model_names}:
            raise UnknownModelError(
                f"there is no model {name[:128]!r} here, only {self.model!r} (or {ALIAS!r}, or one of "
                "gateway.model_names)",
                "model",
            )


class Api:
    """Endpoints that serve requests of one kind."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
