"""Whether the gateway lives, and whether the stack can serve."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.context import HttpContext
from gateway.http.errors import json_response


class HealthApi:
    """Endpoints for those who watch the stack.

    Args:
        context: The gateway's parts.
    """

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def livez(self, request: Request) -> Response:
        """The event loop runs, or nobody would hear this."""
        del request
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Each stage has a replica that is ready; else 503 and the reason."""
        del request
        reasons = self._reasons()
        return json_response(self._verdict(reasons), 503 if reasons else 200)

    async def health(self, request: Request) -> Response:
        """The same, with what is known of each stage."""
        del request
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
            "model": self._context.model,
            "uptime_s": report.gateway.uptime_s,
            "stages": stages,
            "requests": report.requests,
        }
        return json_response(body, 503 if reasons else 200)

    def _reasons(self) -> list[str]:
        """Why the stack cannot serve now."""
        if self._context.gateway.stopping:
            return ["the gateway is draining: it was told to stop"]
        registry = self._context.gateway.registry
        states = {stage: registry.state(stage) for stage in registry.stages}
        return [f"the {stage} is {state}" for stage, state in states.items() if state != "ready"]

    def _verdict(self, reasons: list[str]) -> dict[str, Any]:
        only = {"text_only": True} if "talker" not in self._context.gateway.registry.stages else {}
        return {"status": "unavailable" if reasons else "ok", "reasons": reasons, **only}
