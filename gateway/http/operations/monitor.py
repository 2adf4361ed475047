"""What operators ask of the gateway: its metrics, and what became of a request."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.context import HttpContext
from gateway.http.errors import json_response
from omnirelay.errors import UnknownRequestError
from shared.exposition import expose


class MonitorApi:
    """The endpoints.

    Args:
        context: The gateway's parts.
    """

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def metrics(self, request: Request) -> Response:
        """All metrics, in the form that is asked for."""
        accept = ",".join(request.headers.getlist("accept"))
        body, kind = expose(self._context.gateway.metrics.registry, accept)
        return Response(body, headers={"Content-Type": kind, "Vary": "Accept"})

    async def request(self, request: Request) -> Response:
        """Where a request is, or how it ended.

        Raises:
            UnknownRequestError: It is not known, or not any more.
        """
        name: str = request.path_params["request_id"]
        report = self._context.gateway.report(name.removeprefix("chatcmpl-"))
        if report is None:
            raise UnknownRequestError(f"no request {name[:128]!r} is known here, or it ended too long ago")
        return json_response(msgspec.to_builtins(report))
