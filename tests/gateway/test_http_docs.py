"""The pages on HTTP say what the code does."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator, ValidationError
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.routing import Route, WebSocketRoute

from gateway.access.access import Access
from gateway.access.api_keys import ApiKeys
from gateway.access.certificate import ServerTls
from gateway.access.ephemeral import EphemeralKeys
from gateway.dispatch.registry import StageRegistry
from gateway.fairness.uploads import UploadRoom
from gateway.http.app import make_app
from gateway.http.context import HttpContext
from gateway.http.encoding.encoders import FORMATS
from gateway.http.errors import CODES, status_of
from gateway.http.fields import IGNORED, NEUTRAL
from gateway.http.openai.chat_request import ChatFields
from gateway.http.openai.responses import ResponseFields
from gateway.http.openai.speech import SpeechFields
from gateway.http.openai.transcription import TranscriptionFields
from gateway.http.openapi import DESCRIBED, describe
from gateway.requests.history import RequestReport
from gateway.requests.lifecycle import StateCounts
from gateway.requests.metrics import GatewayMetrics
from omnirelay.errors import BusyError, MessageError, OmniRelayError, RequestError
from shared.config import Config, TlsConfig
from tests.gateway.bench import Configure
from tests.gateway.guarded import keys_file
from tests.gateway.http_bench import HI, MODEL, http_bench, http_gateway, speaking
from tests.gateway.test_tls import Certified

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    """What stands under a page's heading, up to the next."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", page(name), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def words(text: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9_]+)`", text))


def first_cells(text: str) -> set[str]:
    return {
        word for line in text.splitlines() for word in words(line[1:].partition(" | ")[0]) if line[:1] == "|"
    }


def names(struct: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(struct)}


def family(base: type[OmniRelayError]) -> Iterator[type[OmniRelayError]]:
    yield base
    for child in base.__subclasses__():
        yield from family(child)


def test_fields_of_a_chat() -> None:
    assert first_cells(section("api-chat", "Fields")) == names(ChatFields)
    ignored, refused = re.findall(r"^\*(?:Ignored|Refused).*?(?=\n\n)", section("api", "Fields"), re.M | re.S)
    assert words(ignored) == IGNORED
    assert words(refused.partition("*:")[2] or refused.partition("): ")[2]) == set(NEUTRAL)


def test_fields_of_speech_and_of_reports() -> None:
    assert first_cells(section("api-speech", "Speech")) == names(SpeechFields)
    assert first_cells(section("api-chat", "Responses")) == names(ResponseFields)
    assert first_cells(section("api-speech", "Transcriptions")) == names(TranscriptionFields) | {"file"}
    assert first_cells(section("api", "Requests")) == names(RequestReport)


def test_formats() -> None:
    assert first_cells(section("api-speech", "Formats")) == set(FORMATS)


def test_errors() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`\w+` )?\| (\d+) \|", section("errors", "Codes"), re.MULTILINE)
    told = {code: int(status) for code, status in rows}
    expected = {code: status for status, code in CODES.items()} | {"internal": 500}
    for kind in set(family(RequestError)) - {RequestError}:
        error = kind("x", 1) if issubclass(kind, BusyError) else kind("x")
        expected[kind.code] = status_of(error)
    assert told == expected
    assert status_of(MessageError("x")) == 500


def app_of(config: Config) -> Starlette:
    """An application whose endpoints are not called."""
    context = HttpContext(None, config, lambda: None, UploadRoom(1), Access(config), "m")  # type: ignore[arg-type,return-value]
    return make_app(context)


def routes_of(app: Starlette) -> list[Route | WebSocketRoute]:
    return [route for route in app.routes if isinstance(route, Route | WebSocketRoute)]


def test_paths(configure: Callable[..., Config]) -> None:
    table = page("api").partition("\n## ")[0]
    paths = {route.path_format for route in routes_of(app_of(configure(http_gateway())))}
    assert paths == set(re.findall(r"(/[\w./{}]*)`", table))


def unknown_fields(value: Any) -> Iterator[str]:
    """What a model took though it does not know it."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in value.model_fields_set - {*(value.model_extra or ())}:
            yield from unknown_fields(getattr(value, name))
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from unknown_fields(each)


@pytest.mark.parametrize("calls", [False, True])
def test_the_document_is_openapi_and_has_every_route(configure: Callable[..., Config], calls: bool) -> None:
    app = app_of(configure(http_gateway(webrtc={"enabled": calls})))
    document = describe(app.routes)
    assert list(unknown_fields(OpenAPI.model_validate(document))) == []
    asked = {
        (route.path_format, "get" if isinstance(route, WebSocketRoute) else method.lower())
        for route in routes_of(app)
        for method in (route.methods or () if isinstance(route, Route) else ["GET"])
        if method != "HEAD"
    }
    operations = {(path, name): each for path, own in document["paths"].items() for name, each in own.items()}
    assert operations.keys() == asked
    assert len({each["operationId"] for each in operations.values()}) == len(asked)
    assert all(re.fullmatch(r"[A-Z][^`;]+\w\)?", each["summary"]) for each in operations.values())
    bodies = {
        path for (path, method), each in operations.items() if "requestBody" in each and method == "post"
    }
    assert {path for path, method in asked if method == "post"} - bodies == {
        "/v1/realtime/calls/{call_id}/hangup"
    }
    assert DESCRIBED.keys() <= document["paths"].keys()
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert used == schemas.keys()


async def test_the_document_and_its_page_need_no_key_and_say_what_is_taken(
    configure: Configure, tmp_path: Path
) -> None:
    keys = str(keys_file(tmp_path / "keys", alice={"key": "k"}))
    async with http_bench(configure(http_gateway(api_keys=keys))) as b, speaking(b, "Hello", []):
        document = (await b.http.get("/openapi.json")).json()
        shown = await b.http.get("/docs")
        operation = document["paths"]["/v1/chat/completions"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        check = Draft202012Validator(schema | {"components": document["components"]}).validate
        weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        good = {"model": MODEL, "messages": HI, "logit_bias": {"7": 1}, "tools": [weather]}
        key = {"Authorization": "Bearer k"}
        check(good)
        assert (await b.http.post("/v1/chat/completions", json=good, headers=key)).status_code == 200
        wrongs: list[dict[str, Any]] = [
            {"temperature": 3},
            {"messages": [{}]},
            {"logit_bias": {"x": 1}},
            {"n": 0},
        ]
        for wrong in wrongs:
            with pytest.raises(ValidationError):
                check(good | wrong)
            assert (await b.http.post("/v1/chat/completions", json=good | wrong)).status_code == 401
            refused = await b.http.post("/v1/chat/completions", json=good | wrong, headers=key)
            assert refused.status_code == 400
            Draft202012Validator(document["components"]["schemas"]["Error"]).validate(refused.json())
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert "<script" not in shown.text
    assert all(f"{path}</code>" in shown.text for path in document["paths"])
    assert set(re.findall(r'href="#(\w+)"', shown.text)) <= set(re.findall(r' id="(\w+)"', shown.text))


def test_metrics(tmp_path: Path) -> None:
    metrics = GatewayMetrics(StateCounts(), StageRegistry(1, 1))
    metrics.registry.register(ApiKeys(keys_file(tmp_path / "keys", alice={"key": "k"})))
    metrics.registry.register(EphemeralKeys())
    certified = Certified(tmp_path / "own")
    metrics.registry.register(ServerTls(TlsConfig(**certified.config)))
    metrics.told("http", "busy")
    table = page("metrics").partition("\n## Gateway\n")[2]
    told = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(
            r"^\| `(omnirelay_\w+)` \| (\w+) \| (.*?) \|", table, re.MULTILINE
        )
    }
    found = {}
    for metric in metrics.registry.collect():
        if metric.name.startswith("omnirelay_"):
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
            found[name] = (metric.type, labels)
    assert told == found
