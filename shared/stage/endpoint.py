"""``/metrics``, ``/livez`` and ``/readyz`` of a stage over HTTP, on its own thread.

GET only, one request per connection; sizes, times and the number of connections are limited.  Not uvicorn: it
neither limits the time of a request nor makes room by closing the oldest connection.
"""

import asyncio
import errno
import json
import logging
import re
import socket
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Final, Self, cast

from prometheus_client import REGISTRY, CollectorRegistry

from omnirelay.errors import ConfigError
from shared.exposition import expose
from shared.log import LIMITED
from shared.transport.sockets import address_in_use

MAX_HEAD_BYTES: Final = 16 * 1024
"""Limit on request line and headers."""
MAX_CONNECTIONS: Final = 64
"""For one more the oldest is closed, so that idle ones cannot keep others out."""
TIMEOUT_S: Final = 5.0
"""For a whole request, delivery of the response included."""
_END: Final = b"\r\n\r\n"
_REQUEST_LINE: Final = re.compile(r"([A-Z]{1,16}) (/[!->@-~]*)(?:\?[!-~]*)? HTTP/1\.[01]")
_ACCEPT: Final = re.compile(r"\r\n(?i:accept):([^\r\n]*)")

Check = Callable[[], str | None]
"""Returns what is wrong, or None."""
log = logging.getLogger(__name__)


class HttpEndpoint:
    """Listens from creation to :meth:`close`.

    Args:
        address: ``tcp://HOST:PORT``; the host ``*`` is every interface.

    Raises:
        AddressInUseError: Another process listens there.
        ConfigError: The address cannot be used.
    """

    def __init__(
        self, address: str, live: Check, ready: Check, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._checks: Final = {"/livez": live, "/readyz": ready}
        self._registry: Final = registry
        self._listener = _listen(address)
        self._open: dict[_Connection, None] = {}
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and drop every connection; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        make = partial(_Connection, self._open, self._answer)
        async with await self._loop.create_server(make, sock=self._listener):
            await self._stopping.wait()
        for connection in list(self._open):
            connection.drop()
        # Dropped connections are closed in the loop's next iteration.
        await asyncio.sleep(0)

    def _answer(self, head: str) -> bytes:
        """The response to a request line with its headers."""
        request = _REQUEST_LINE.fullmatch(head.partition("\r\n")[0])
        if request is None:
            return _response(HTTPStatus.BAD_REQUEST)
        method, path = request.groups()
        if method not in {"GET", "HEAD"}:
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        response = self._get(path, head)
        return response if method == "GET" else response[: response.index(_END) + len(_END)]

    def _get(self, path: str, head: str) -> bytes:
        if path == "/metrics":
            return self._scrape(",".join(_ACCEPT.findall(head)))
        if path not in self._checks:
            return _response(HTTPStatus.NOT_FOUND)
        reason = self._checks[path]()
        if reason is None:
            return _response(HTTPStatus.OK, body=json.dumps({"status": "ok"}))
        body = json.dumps({"status": "unavailable", "reason": reason})
        return _response(HTTPStatus.SERVICE_UNAVAILABLE, body=body)

    def _scrape(self, accept: str) -> bytes:
        try:
            body, kind = expose(self._registry, accept)
        except Exception:
            # The health checks must survive a broken metric.
            log.exception("the metrics could not be read", extra=LIMITED)
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _response(HTTPStatus.OK, {"Content-Type": kind, "Vary": "Accept"}, body)


class _Connection(asyncio.Protocol):
    """One client: reads its request, sends the response, closes.

    Args:
        others: The open connections, the oldest first, this one included; of too many the oldest is dropped.
        answer: The response to a request's head.
    """

    def __init__(self, others: "dict[_Connection, None]", answer: Callable[[str], bytes]) -> None:
        self._others = others
        self._answer = answer
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self._transport = cast("asyncio.Transport", transport)
        self._deadline = asyncio.get_running_loop().call_later(TIMEOUT_S, self._transport.abort)
        if len(self._others) >= MAX_CONNECTIONS:
            next(iter(self._others)).drop()
        self._others[self] = None

    def data_received(self, data: bytes) -> None:
        """Answer once the head is complete."""
        self._head += data
        head, end, _ = self._head.partition(_END)
        # The last bytes may be the beginning of the end marker.
        if len(head) > MAX_HEAD_BYTES + (0 if end else len(_END) - 1):
            self._transport.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        elif end:
            self._transport.write(self._answer(head.decode("latin-1")))
        else:
            return
        # The response is still delivered, until the deadline; nothing more is read.
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if exc is not None:
            log.debug("an HTTP client did not take its response: %r", exc)
        self._deadline.cancel()
        self._others.pop(self, None)

    def drop(self) -> None:
        """Close without delivering."""
        self._others.pop(self, None)
        self._transport.abort()


def _listen(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = "" if host == "*" else host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise address_in_use(address) from error
        raise ConfigError(f"cannot listen on {address}: {error}") from error


def _response(status: HTTPStatus, headers: dict[str, str] | None = None, body: bytes | str = b"") -> bytes:
    """A whole response; a body of type str is JSON."""
    data = body if isinstance(body, bytes) else body.encode()
    fields = {
        "Content-Type": "text/plain" if isinstance(body, bytes) else "application/json",
        **(headers or {}),
        "Content-Length": str(len(data)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {fields[name]}" for name in fields)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data
