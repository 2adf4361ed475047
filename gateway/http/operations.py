"""Endpoints for operators: health, metrics, and the state of a request."""

import re
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.context import Api
from gateway.http.errors import json_response
from omnirelay.errors import UnknownRequestError
from omnirelay.version import version
from shared.exposition import metrics_response

OBJECT_ID: Final = re.compile(r"\A(?:chatcmpl-|cmpl-|resp_)")
"""What comes before a request's id in the ids of OpenAI's objects."""


class OperationsApi(Api):
    """The endpoints."""

    async def livez(self, _request: Request) -> Response:
        """Answer 200 as long as the event loop runs."""
        return json_response({"status": "ok"})

    async def readyz(self, _request: Request) -> Response:
        """Answer 200 if every stage has a ready replica, else 503 with reasons."""
        reasons = self._reasons()
        return json_response(self._verdict(reasons), 503 if reasons else 200)

    async def version(self, _request: Request) -> Response:
        """Answer the version of the gateway."""
        return json_response({"version": version()})

    async def health(self, _request: Request) -> Response:
        """Answer as ``readyz``, with the state of each stage."""
        reasons = self._reasons()
        report = self._context.status()
        stages = [
            {
                "name": stage.name,
                "state": stage.state,
                "heartbeat_age_s": stage.heartbeat_age_s,
                "load": msgspec.to_builtins(stage.load),
            }
            for stage in report.stages
        ]
        body = {
            **self._verdict(reasons),
            "version": version(),
            "model": self._context.model,
            "uptime_s": report.gateway.uptime_s,
            "stages": stages,
            "requests": report.requests,
        }
        return json_response(body, 503 if reasons else 200)

    async def metrics(self, request: Request) -> Response:
        """Answer all metrics in the requested format."""
        return metrics_response(request, self._context.gateway.metrics.registry)

    async def request(self, request: Request) -> Response:
        """Answer the state of a request, or how it ended.

        Raises:
            UnknownRequestError: It is unknown, or ended too long ago.
        """
        name: str = request.path_params["request_id"]
        report = self._context.gateway.report(OBJECT_ID.sub("", name))
        if report is None:
            raise UnknownRequestError(f"the request {name[:128]!r} is unknown, or ended too long ago")
        return json_response(msgspec.to_builtins(report))

    def _reasons(self) -> list[str]:
        """Why the stack cannot serve requests."""
        if self._context.gateway.stopping:
            return ["the gateway is draining: it was told to stop"]
        registry = self._context.gateway.registry
        states = {stage: registry.state(stage) for stage in registry.stages}
        return [f"the {stage} is {state}" for stage, state in states.items() if state != "ready"]

    def _verdict(self, reasons: list[str]) -> dict[str, Any]:
        only = {"text_only": True} if "talker" not in self._context.gateway.registry.stages else {}
        return {"status": "unavailable" if reasons else "ok", "reasons": reasons, **only}
