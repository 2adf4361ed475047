"""The pages on HTTP say what the code does."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
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
from gateway.requests.history import RequestReport
from gateway.requests.lifecycle import StateCounts
from gateway.requests.metrics import GatewayMetrics
from omnirelay.errors import BusyError, MessageError, OmniRelayError, RequestError
from shared.config import Config, TlsConfig
from tests.gateway.guarded import keys_file
from tests.gateway.http_bench import http_gateway
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


def test_paths(configure: Callable[..., Config]) -> None:
    config = configure(http_gateway())
    context = HttpContext(None, config, lambda: None, UploadRoom(1), Access(config), "m")  # type: ignore[arg-type,return-value]
    routes = [route for route in make_app(context).routes if isinstance(route, Route | WebSocketRoute)]
    table = page("api").partition("\n## ")[0]
    assert {route.path.replace(":path", "") for route in routes} == set(re.findall(r"(/[\w/{}]*)`", table))


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
