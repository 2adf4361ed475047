"""What one connection may have open at once, and leave unread."""

from typing import Final

import msgspec

from gateway.access.clients import RETRY_OWN_REQUESTS_MS, Principal
from omnirelay.errors import BusyError, SlowClientError
from omnirelay.protocol import GenerateRequest

UNREAD_OF_ONE: Final = 2**20
"""What a client that reads leaves unread at most."""


class Unread:
    """What all clients together have not read.

    Args:
        limit: So many bytes may wait; then a client that has left :data:`UNREAD_OF_ONE` unread gets no more.

    Attributes:
        total: Bytes of answers that wait.
        requests: Those whose end their clients have not taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self.total = 0
        self.requests = 0


class ClientAccount:
    """What one connection may have open at once, and its client over all connections.

    Args:
        name: For the log.
        max_requests: Requests whose end the connection has not taken.
        max_backlog_bytes: Bytes of answer that the connection has not taken.
        client: Whose connection it is; none makes it a client of its own.
        unread: Where what waits for all is counted.
    """

    def __init__(
        self,
        name: str,
        max_requests: int,
        max_backlog_bytes: int,
        client: Principal | None = None,
        unread: Unread | None = None,
    ) -> None:
        self.name: Final = name
        self.max_requests: Final = max_requests
        self.client = client or Principal(name)
        self._max_backlog_bytes = max_backlog_bytes
        self._unread = unread or Unread(max_backlog_bytes)
        self.open_requests = 0
        self.backlog_bytes = 0

    @property
    def share(self) -> str:
        """What its client's share of the gateway goes by."""
        return self.client.name

    def allowed(self, request: GenerateRequest) -> GenerateRequest:
        """Give a request no more urgent than the client may make it."""
        best = self.client.limits.best_priority
        return request if request.priority >= best else msgspec.structs.replace(request, priority=best)

    def open(self) -> None:
        """Count one more request.

        Raises:
            BusyError: The connection, or the client, has as many as it may.
            UnauthenticatedError: The client is not known.
        """
        if self.open_requests >= self.max_requests:
            raise self.busy()
        self.client.open()
        self.open_requests += 1
        self._unread.requests += 1

    def end(self) -> None:
        """Count one less."""
        self.open_requests -= 1
        self._unread.requests -= 1
        self.client.close()

    def busy(self) -> BusyError:
        """Give the answer to one request too many."""
        return BusyError(
            f"this client has {self.max_requests} requests open, no more are taken", RETRY_OWN_REQUESTS_MS
        )

    def charge(self, size: int) -> None:
        """Count bytes that wait for the connection.

        Raises:
            SlowClientError: They are more than may wait.
        """
        if self.backlog_bytes + size > self._max_backlog_bytes:
            raise self._too_slow(self._max_backlog_bytes)
        unread = self._unread
        if unread.total + size > unread.limit and self.backlog_bytes > UNREAD_OF_ONE:
            raise self._too_slow(UNREAD_OF_ONE)
        self.backlog_bytes += size
        unread.total += size

    def release(self, size: int) -> None:
        """Count bytes that the connection has taken, or never will."""
        self.backlog_bytes -= size
        self._unread.total -= size

    def _too_slow(self, most: int) -> SlowClientError:
        return SlowClientError(
            f"{self.backlog_bytes} bytes of answer wait to be read, no more than {most} are kept now"
        )
