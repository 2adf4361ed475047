"""``/v1/models``: the one model that is served."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.context import Api
from gateway.http.errors import json_response


class ModelsApi(Api):
    """The endpoints."""

    async def list(self, _request: Request) -> Response:
        """Answer the list of models."""
        return json_response({"object": "list", "data": [self._card()]})

    async def get(self, request: Request) -> Response:
        """Answer one model.

        Raises:
            UnknownModelError: It is not served.
        """
        self._context.require_model(request.path_params["model"])
        return json_response(self._card())

    async def voices(self, _request: Request) -> Response:
        """Answer the voices, in the form in which Open WebUI and vLLM-Omni's clients look for them."""
        aliases = self._context.gateway.validator.voice_aliases()
        names = [*self._context.gateway.registry.speakers(), *aliases]
        return json_response({"object": "list", "voices": [{"id": name, "name": name} for name in names]})

    def _card(self) -> dict[str, Any]:
        registry = self._context.gateway.registry
        media = self._context.config.media
        return {
            "id": self._context.model,
            "object": "model",
            "created": self._context.started,
            "owned_by": "omnirelay",
            "max_model_len": registry.max_positions("thinker"),
            "voices": registry.speakers(),
            "voice_aliases": self._context.gateway.validator.voice_aliases(),
            "starters": list(self._context.starters),
            "random_weights": self._context.random_weights,
            "calls": self._context.config.gateway.webrtc.enabled,
            "limits": {
                "item_bytes": media.max_item_bytes,
                "request_bytes": media.max_request_bytes,
                "images": media.max_images,
                "audios": media.max_audios,
                "videos": media.max_videos,
            },
        }
