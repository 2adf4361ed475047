"""``/metrics``, ``/livez`` and ``/readyz`` of a stage, over HTTP, from a thread of its own.

One event loop serves all connections, so that a slow client keeps nobody waiting; size, time and number of
connections are bounded.  It serves Prometheus and health checks: GET and HEAD only, one request a connection.
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
"""Largest request line with its headers."""
MAX_CONNECTIONS: Final = 64
"""Open at a time; for one more the oldest is closed, so that silent ones cannot keep others out."""
TIMEOUT_S: Final = 5.0
"""For a whole request: its head, and until its answer is taken."""
_END: Final = b"\r\n\r\n"
_REQUEST_LINE: Final = re.compile(r"([A-Z]{1,16}) (/[!->@-~]*)(?:\?[!-~]*)? HTTP/1\.[01]")
_ACCEPT: Final = re.compile(r"\r\n(?i:accept):([^\r\n]*)")

Check = Callable[[], str | None]
"""Says what is wrong, or nothing."""
log = logging.getLogger(__name__)


class HttpEndpoint:
    """Listens from when it is made until :meth:`close`.

    Args:
        address: ``tcp://HOST:PORT``; the host ``*`` is all of the machine's.
        live: Asked for ``/livez``.
        ready: Asked for ``/readyz``.
        registry: What ``/metrics`` shows.

    Raises:
        AddressInUseError: Another process listens there.
        ConfigError: The address cannot be used at all.
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
        """Stop listening and drop every connection; a second time, nothing."""
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
        # What was dropped is closed when the loop comes round.
        await asyncio.sleep(0)

    def _answer(self, head: str) -> bytes:
        """Answer a request, given its first line and its headers."""
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
        if path in self._checks:
            return self._check(path)
        return _response(HTTPStatus.NOT_FOUND)

    def _check(self, path: str) -> bytes:
        reason = self._checks[path]()
        if reason is None:
            return _response(HTTPStatus.OK, body=json.dumps({"status": "ok"}))
        body = json.dumps({"status": "unavailable", "reason": reason})
        return _response(HTTPStatus.SERVICE_UNAVAILABLE, body=body)

    def _scrape(self, accept: str) -> bytes:
        try:
            body, kind = expose(self._registry, accept)
        except Exception:
            # A metric that cannot be read must not take the health checks with it.
            log.exception("the metrics could not be read", extra=LIMITED)
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _response(HTTPStatus.OK, {"Content-Type": kind, "Vary": "Accept"}, body)


class _Connection(asyncio.Protocol):
    """One client: takes its request, sends the answer, and hangs up.

    Args:
        others: The open connections, the oldest first; it adds itself, and drops the oldest of too many.
        answer: Gives the bytes to send for a request's head.
    """

    def __init__(self, others: "dict[_Connection, None]", answer: Callable[[str], bytes]) -> None:
        self._others = others
        self._answer = answer
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self._transport = cast("asyncio.Transport", transport)
        self._deadline = asyncio.get_running_loop().call_later(TIMEOUT_S, self._transport.abort)
        if len(self._others) >= MAX_CONNECTIONS:
            next(iter(self._others)).drop()
        self._others[self] = None

    def data_received(self, data: bytes) -> None:
        """A part of the request came."""
        self._head += data
        head, end, _ = self._head.partition(_END)
        # Without its end, the last bytes may be the end's first ones.
        if len(head) > MAX_HEAD_BYTES + (0 if end else len(_END) - 1):
            self._transport.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        elif end:
            self._transport.write(self._answer(head.decode("latin-1")))
        else:
            return
        # What is written is still delivered, until the deadline; nothing more is read.
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has its answer, or is gone."""
        if exc is not None:
            log.debug("an HTTP client did not take its answer: %r", exc)
        self._deadline.cancel()
        self._others.pop(self, None)

    def drop(self) -> None:
        """Hang up."""
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
    """A whole answer; text is JSON."""
    data = body if isinstance(body, bytes) else body.encode()
    fields = {
        "Content-Type": "text/plain" if isinstance(body, bytes) else "application/json",
        **(headers or {}),
        "Content-Length": str(len(data)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {fields[name]}" for name in fields)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data
