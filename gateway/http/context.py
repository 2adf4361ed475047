"""What the endpoints share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from starlette.requests import HTTPConnection

from gateway.access.access import Access
from gateway.access.account import ClientAccount
from gateway.fairness.uploads import UploadRoom
from gateway.http.encoding.audio import AudioPool
from gateway.http.guards.keys import client_of
from gateway.manager import Gateway
from omnirelay.errors import OmniRelayError, UnknownModelError
from omnirelay.status import StatusReport
from shared.config import Config

ALIAS: Final = "omnirelay"
"""A name that whatever model is served goes by."""


@dataclass(frozen=True)
class HttpContext:
    """The gateway's parts that answer HTTP requests.

    Attributes:
        gateway: Answers requests.
        config: The whole stack's.
        status: Says how the stack is.
        uploads: Memory for large bodies, shared with the other servers.
        access: Who may come in, and what each may have.
        model: What clients call the served model.
        audio: Encodes speech.
        started: Unix time of the gateway's start.
    """

    gateway: Gateway
    config: Config
    status: Callable[[], StatusReport]
    uploads: UploadRoom
    access: Access
    model: str
    audio: AudioPool = field(default_factory=AudioPool)
    started: int = field(default_factory=lambda: int(time.time()))
    _clients: "count[int]" = field(default_factory=lambda: count(1))

    def account(self, request: HTTPConnection) -> ClientAccount:
        """Open an account for one HTTP request or WebSocket."""
        return self.access.account(f"HTTP client {next(self._clients)}", client_of(request.scope))

    def share(self, request: HTTPConnection) -> str:
        """What a client's share of memory for uploads goes by."""
        return self.access.share(client_of(request.scope), request.client.host if request.client else "")

    def told(self, error: OmniRelayError) -> None:
        """Count an error that a client is told."""
        self.gateway.metrics.told("http", error.code)

    def require_model(self, name: str) -> None:
        """Check that a request means the model that is served.

        Raises:
            UnknownModelError: It names another one.
        """
        if name not in {self.model, ALIAS}:
            raise UnknownModelError(
                f"there is no model {name[:128]!r} here, only {self.model!r} (or {ALIAS!r})", "model"
            )
