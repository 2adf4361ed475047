"""The pages on HTTP say what the code does; so do the README and the guides, whose commands and examples run.

``omnirelay up`` and ``demo`` are tested elsewhere, ``doctor`` with the whole stack.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator, ValidationError
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.routing import Route, WebSocketRoute

from gateway.access.api_keys import ApiKeys, EphemeralKeys
from gateway.access.certificate import ServerTls
from gateway.dispatch.registry import StageRegistry
from gateway.http.encoding.encoders import FORMATS
from gateway.http.openapi import DESCRIBED, describe
from gateway.requests.history import RequestReport
from gateway.requests.lifecycle import StateCounts
from gateway.requests.metrics import GatewayMetrics
from omnirelay.cli.main import main
from shared.config import DEFAULT_CHECKPOINT, TlsConfig
from tests.gateway.bench import Configure, Patch, keys_file
from tests.gateway.fake_stages import SPEAKERS
from tests.gateway.http_bench import HI, MODEL, HttpBench, app_of, http_bench, http_gateway, speaking
from tests.gateway.test_tls import Certified
from tests.support.children import ROOT
from tests.support.media import spoken
from tests.support.monitoring import documented, scraped
from tests.support.terminal import environment

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


def test_fields_of_reports() -> None:
    assert first_cells(section("api", "Requests")) == names(RequestReport)


@pytest.mark.parametrize("name", ["ChatFields", "ResponseFields", "SpeechFields", "TranscriptionFields"])
def test_each_field_of_a_body_is_described(name: str) -> None:
    properties = describe(())["components"]["schemas"][name]["properties"]
    assert [field for field, each in properties.items() if not each.get("description")] == []


def test_formats() -> None:
    assert first_cells(section("api-speech", "Formats")) == set(FORMATS)


def routes_of(app: Starlette) -> list[Route | WebSocketRoute]:
    return [route for route in app.routes if isinstance(route, Route | WebSocketRoute)]


def test_paths(configure: Configure) -> None:
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
def test_the_document_is_openapi_and_has_every_route(configure: Configure, calls: bool) -> None:
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


async def test_the_document_needs_no_key_and_says_what_is_taken(configure: Configure, tmp_path: Path) -> None:
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
    assert scraped(metrics.registry.collect()) == documented("The gateway")


async def test_slashes_too_many(web: HttpBench) -> None:
    plain = (await web.http.get("/v1/models")).json()
    for path in ("//v1/models", "/v1/models/", "/v1//models//"):
        assert (await web.http.get(web.url + path)).json() == plain
    assert "/docs of this gateway" in (await web.http.get("/v1/none/")).text


async def test_voices_as_clients_list_them(web: HttpBench) -> None:
    voices = (await web.http.get("/v1/audio/voices")).json()["voices"]
    names = [each["id"] for each in voices]
    assert sorted(names[: len(SPEAKERS)]) == sorted(SPEAKERS)
    assert "alloy" in names
    assert all(each["name"] == each["id"] for each in voices)


async def test_further_names_of_the_model(configure: Configure) -> None:
    config = configure(http_gateway(model_names=["tts-1"]))
    async with http_bench(config) as b, speaking(b, "Hello", []):
        assert (await b.post(model="tts-1")).status_code == 200
        refused = await b.post(model="tts-2")
        assert refused.status_code == 404
        assert "gateway.model_names" in refused.text


async def test_tokens_of_a_text_and_back(web: HttpBench) -> None:
    async with speaking(web, "Hello", []):
        text = "How are you? 😀 <|im_end|>"
        body = {"model": MODEL, "prompt": text, "add_special_tokens": True, "return_token_strs": True}
        answer = (await web.http.post("/tokenize", json=body)).json()
        # Special tokens of a client are ordinary text.
        assert len(answer["tokens"]) > len(web.encode(text))
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == web.stages.max_positions
        back = await web.http.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": text}
        chat = (await web.http.post("/tokenize", json={"messages": HI})).json()
        await web.post()
        assert chat["tokens"] == web.stages.requests[0].prompt_token_ids
        wrongs: list[dict[str, Any]] = [{}, {"prompt": 5}, {"messages": []}, {"prompt": "x", "model": "none"}]
        for wrong in wrongs:
            assert (await web.http.post("/tokenize", json=wrong)).status_code in (400, 404)
        assert (await web.http.post("/detokenize", json={"tokens": ["x"]})).status_code == 400
        assert (await web.http.post("/detokenize", json={"tokens": [-1]})).status_code == 400


PAGES = [ROOT / name for name in ("README.md", "docs/client.md", "docs/cli.md")]
API = [ROOT / f"docs/{name}.md" for name in ("api", "api-chat", "api-speech", "api-realtime")]
FILES = ["question.ogg", "bark.mp3", "cat.jpg", "dog.png", "house.jpg", "other.jpg", "film.mp4"]


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def here(block: str, b: HttpBench) -> str:
    """An example, with this gateway's addresses."""
    return block.replace("tcp://127.0.0.1:5555", b.listen).replace("http://127.0.0.1:8000", b.url.rstrip("/"))


async def test_the_examples_run(web: HttpBench, tmp_path: Path, monkeypatch: Patch) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).write_bytes(name.encode())
    web.stages.serve(web.encode("Hello"))
    for page in PAGES:
        for block in examples(page):
            example = compile(here(block, web), page.name, "exec")
            await asyncio.to_thread(exec, example, {"__name__": page.stem})
    lines = re.findall(r"^    omnirelay (chat .*--(?:audio|image|video) [^\]\n]*)$", text, re.MULTILINE)
    for line in lines:
        assert await asyncio.to_thread(main, [*shlex.split(line), "--gateway", web.listen]) == 0
    sent = [tuple(item.kind for item in request.media) for request in web.stages.requests]
    assert len(lines) == 4
    assert sent[-4:] == [("audio",), ("image",), ("video",), ("audio", "image", "image")]
    assert {"audio", "image", "video"} <= {kind for kinds in sent[:-4] for kind in kinds}


async def test_the_examples_for_http_run(web: HttpBench, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("question.wav").write_bytes(spoken())

    web.stages.serve(web.encode("Hello"))
    names: dict[str, object] = {}
    # The pages do not close them; when they are collected, and whether in peace, would be chance.
    clients = set()
    for page in API:
        for block in examples(page):
            await asyncio.to_thread(exec, compile(here(block, web), page.name, "exec"), names)
            clients.add(names["client"])
    for client in clients:
        if isinstance(client, openai.OpenAI):
            client.close()
    assert Path("reply.mp3").stat().st_size > 100
    # Samples of the imitated stages.
    assert Path("reply.pcm").stat().st_size == 2 * 360
    assert Path("morning.wav").stat().st_size == 44 + 2 * 360


SHIM = """#!/bin/sh
case "$1" in chat|status) set -- "$@" --gateway {gateway};; esac
exec {python} -m omnirelay.cli "$@"
"""


def commands() -> list[str]:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").replace("\\\n", "")
    found = re.findall(r"^ {4}((?:omnirelay|printf|curl|source <).*)$", text, re.MULTILINE)
    return [command for command in found if command != "omnirelay doctor"]


async def test_the_quick_start(web: HttpBench, tmp_path: Path) -> None:
    assert len(commands()) >= 8
    made = tmp_path / DEFAULT_CHECKPOINT
    made.parent.mkdir(parents=True)
    made.symlink_to(ROOT / "checkpoint" / made.name)
    web.stages.serve(web.encode("Hello"))
    shim = tmp_path / "omnirelay"
    shim.write_text(SHIM.format(gateway=web.listen, python=sys.executable))
    shim.chmod(0o755)
    for command in commands():
        if command.startswith("curl") and shutil.which("curl") is None:
            continue
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-ec", here(command, web)],
            cwd=tmp_path,
            env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=str(ROOT)),
            input=b"Hi\n" if command == "omnirelay chat" else b"",
            capture_output=True,
        )
        if not command.startswith("curl"):
            assert done.returncode == 0, (command, done.stderr)
            assert (b"written: reply.wav\n" in done.stderr) == ("--out reply.wav" in command)
        assert b"Hello" in done.stdout or command.startswith(("omnirelay status", "source"))
    kinds = [tuple(item.kind for item in request.media) for request in web.stages.requests]
    assert kinds == [(), (), (), ("image",), ("audio",), ()]
    assert (tmp_path / "reply.wav").stat().st_size > 44
