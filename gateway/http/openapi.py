"""``/openapi.json`` and ``/docs``: the HTTP API, described by its routes and by the structs of bodies."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

import jinja2
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from gateway.http.encoding.encoders import CONTENT_TYPES
from gateway.http.errors import JSON, json_response
from gateway.http.guards import is_open
from gateway.http.openai.chat_request import ChatFields
from gateway.http.openai.completions import OF_CHATS
from gateway.http.openai.messages import Message
from gateway.http.openai.responses import CHATS, ResponseFields
from gateway.http.openai.speech import FORMATS, SpeechFields
from gateway.http.openai.tokens import DetokenizeFields
from gateway.http.openai.transcription import TranscriptionFields
from gateway.http.page import PageApi
from gateway.http.realtime.endpoint import ClientSecretFields
from omnirelay.version import version
from shared.docstrings import described_fields

EVENTS: Final = "text/event-stream"
FORM: Final = "multipart/form-data"
HTML: Final = "text/html"
SDP: Final = "application/sdp"
TEXT: Final = "text/plain"
PLACE: Final = "#/components/schemas/"
STRUCTS: Final = (
    ChatFields,
    ClientSecretFields,
    DetokenizeFields,
    Message,
    ResponseFields,
    SpeechFields,
    TranscriptionFields,
)
"""What bodies become."""
BYTES: Final = {"type": "string", "format": "binary"}
STRING: Final = {"type": "string"}


@dataclass(frozen=True)
class Described:
    """What a route does not say of itself.

    Attributes:
        body: The schema of a body, by its media type.
        answers: Media types by status; the errors of other statuses are all alike.
    """

    body: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[int, Sequence[str]] = field(default_factory=lambda: {200: (JSON,)})


def _refers(name: str) -> dict[str, str]:
    return {"$ref": f"{PLACE}{name}"}


_TRANSCRIPTION: Final = Described({FORM: _refers("TranscriptionFields")}, {200: (JSON, TEXT, EVENTS)})
_SOUND: Final = tuple(CONTENT_TYPES[each].partition(";")[0] for each in FORMATS.values())
DESCRIBED: Final[Mapping[str, Described]] = {
    "/": Described(answers={200: (HTML,)}),
    "/docs": Described(answers={200: (HTML,)}),
    "/page/{name}": Described(answers={200: ("*/*",)}),
    **dict.fromkeys(("/readyz", "/health"), Described(answers={200: (JSON,), 503: (JSON,)})),
    "/metrics": Described(answers={200: (TEXT, "application/openmetrics-text")}),
    "/tokenize": Described({JSON: _refers("TokenizeFields")}),
    "/detokenize": Described({JSON: _refers("DetokenizeFields")}),
    "/v1/chat/completions": Described({JSON: _refers("ChatFields")}, {200: (JSON, EVENTS)}),
    "/v1/completions": Described({JSON: _refers("CompletionFields")}, {200: (JSON, EVENTS)}),
    "/v1/responses": Described({JSON: _refers("ResponseFields")}, {200: (JSON, EVENTS)}),
    "/v1/audio/speech": Described({JSON: _refers("SpeechFields")}, {200: (*_SOUND, EVENTS)}),
    "/v1/audio/transcriptions": _TRANSCRIPTION,
    "/v1/audio/translations": _TRANSCRIPTION,
    "/v1/realtime/client_secrets": Described({JSON: _refers("ClientSecretFields")}),
    "/v1/realtime/calls": Described({SDP: STRING, FORM: _refers("CallFields")}, {201: (SDP,)}),
    "/v1/realtime/calls/{call_id}/hangup": Described(answers={200: ()}),
}
"""By path; all others answer JSON, and read no body."""


class OpenApi:
    """The endpoints.

    Args:
        page: Serves the page with its headers.
    """

    def __init__(self, page: PageApi) -> None:
        self._page = page
        self._document: dict[str, Any] = {}

    async def document(self, request: Request) -> Response:
        """Answer this description of the API (OpenAPI 3.1)."""
        return json_response(self._described(request))

    async def page(self, request: Request) -> Response:
        """Answer this description as a page."""
        return self._page.html(as_page(self._described(request)))

    def _described(self, request: Request) -> dict[str, Any]:
        # The routes are complete by then; these endpoints are among them.
        self._document = self._document or describe(request.app.routes)
        return self._document


def describe(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Build the document of some routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, WebSocketRoute):
            methods = ["get"]
            done = {"101": {"description": "The connection is a WebSocket now"}}
        elif isinstance(route, Route):
            methods = sorted(each.lower() for each in (route.methods or set()) - {"HEAD"})
            done = _done(DESCRIBED.get(route.path_format, Described()))
        else:
            continue
        for method in methods:
            # A WebSocket comes before the route that tells others of it.
            paths.setdefault(route.path_format, {}).setdefault(method, _operation(route, method, done))
    return {
        "openapi": "3.1.0",
        "info": {"title": "OmniRelay", "version": version()},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route | WebSocketRoute, method: str, done: dict[str, Any]) -> dict[str, Any]:
    first = (route.endpoint.__doc__ or "").partition("\n")[0].replace("``", "")
    error = {JSON: {"schema": _refers("Error")}}
    operation: dict[str, Any] = {
        "operationId": "_".join([method, *re.findall(r"\w+", route.path_format)]),
        "summary": re.split(r";|\.\Z", first)[0],
        "responses": done | {"default": {"description": "An error", "content": error}},
    }
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": STRING}
            for name in route.param_convertors
        ]
    body = DESCRIBED.get(route.path_format, Described()).body
    if method == "post" and body:
        content = {media: {"schema": schema} for media, schema in body.items()}
        operation["requestBody"] = {"required": True, "content": content}
    if is_open(route.path):
        operation["security"] = []
    return operation


def _done(described: Described) -> dict[str, Any]:
    return {
        str(status): {"description": HTTPStatus(status).phrase, "content": {media: {} for media in kinds}}
        for status, kinds in described.answers.items()
    }


def _schemas() -> dict[str, Any]:
    """Schemas of all bodies: msgspec's, and what the endpoints read besides these structs."""
    found: dict[str, Any] = msgspec.json.schema_components(STRUCTS, ref_template=PLACE + "{name}")[1]
    for struct in STRUCTS:
        for name, said in described_fields(struct).items():
            found[struct.__name__]["properties"][name]["description"] = said
    for schema in found.values():
        schema["description"] = schema.get("description", "").partition("\n\nAttributes:")[0]
    chat = found["ChatFields"]["properties"]
    chat["messages"]["items"] = _refers("Message")
    prompt = {"anyOf": [STRING, {"type": "array"}], "description": "A text, or token ids."}
    found["CompletionFields"] = _object(
        ["model", "prompt"],
        prompt=prompt,
        **{name: schema for name, schema in chat.items() if name not in OF_CHATS},
    )
    found["TokenizeFields"] = _object(
        [], model=STRING, prompt=prompt, messages=chat["messages"], return_token_strs={"type": "boolean"}
    )
    found["ResponseFields"]["properties"] |= {name: chat[name] for name in sorted(CHATS)}
    form = found["TranscriptionFields"]
    form["properties"]["file"] = BYTES | {"description": "The recording."}
    form["required"].append("file")
    found["CallFields"] = _object(["sdp"], sdp=STRING, session={"type": "object"})
    nullable = {"type": ["string", "null"]}
    error = _object(["message", "type", "code"], message=STRING, type=STRING, code=STRING, param=nullable)
    found["Error"] = _object(["error"], error=error)
    portable: dict[str, Any] = _portable(found)
    return portable


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _portable(schema: Any) -> Any:
    r"""Write patterns as JSON Schema has them: there ``\Z`` is a letter."""
    if isinstance(schema, list):
        return [_portable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: each.replace(r"\Z", "$") if name == "pattern" and isinstance(each, str) else _portable(each)
        for name, each in schema.items()
    }


@cache
def _template() -> jinja2.Template:
    source = (files("gateway.http.page") / "reference.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True)
    environment.filters["json"] = json.dumps
    return environment.from_string(source)


def as_page(document: Mapping[str, Any]) -> str:
    """Write each operation, and each schema with its fields."""
    return _template().render(document)
