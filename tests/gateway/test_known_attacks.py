"""Attacks on servers like this one that have become known, tried on a real gateway: docs/security.md."""

import asyncio
import base64
import json
import os
import pickle
import struct
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zmq

from omnirelay.protocol import GenerateRequest, Refusal, Submit
from shared.config import Config
from shared.messages import ControlToStage, TalkerInput, ThinkerInput, ThinkRequest, Token2WavInput
from shared.transport.wire import VERSION_BYTE
from tests.gateway.bench import Bench, Configure, RawClient, serves
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HI, HttpBench, http_bench, http_gateway


class Harmful:
    """Unpickled, it would make a directory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """What a pickle would make, if anybody unpickled it."""
    target = tmp_path / "made"
    yield target
    assert not target.exists()
    pickle.loads(pickle.dumps(Harmful(target)))  # noqa: S301  To see that the pickle would have done it.
    assert target.exists()


def pickles(target: Path) -> list[list[bytes]]:
    """The same pickle wherever somebody might look for one."""
    harmful = pickle.dumps(Harmful(target))
    as_extension = msgspec.msgpack.encode({"type": msgspec.msgpack.Ext(1, harmful)})
    return [[harmful], [VERSION_BYTE + harmful], [VERSION_BYTE + as_extension], [b"", harmful], [harmful] * 2]


async def test_a_pickle_on_the_gateways_sockets_stays_bytes(tcp: Bench, target: Path) -> None:
    sent = 0
    with zmq.Context() as context:
        for kind, address in ((zmq.PUSH, "events"), (zmq.DEALER, "control")):
            with context.socket(kind) as sender:
                sender.connect(getattr(tcp.config.gateway, address))
                for frames in pickles(target):
                    sender.send_multipart(frames)
                    sent += 1
        await until(lambda: sum(tcp.process.status().refused.values()) == sent, "all are refused")
    raw = await RawClient.connect(tcp)
    for frames in pickles(target):
        raw.say_bytes(b"".join(frames))
        assert isinstance(await raw.hear(), Refusal)
    raw.say(Submit(1, msgspec.Raw(msgspec.msgpack.encode(pickle.dumps(Harmful(target))))))
    assert (await raw.hear()).event.code == "invalid_request"  # type: ignore[union-attr]
    await raw.close()
    await serves(tcp)


def embeddings() -> str:
    """Rows as vLLM takes them of its callers, in base64."""
    rows = np.full((4, 64), np.nan, np.float32).tobytes()
    return base64.b64encode(struct.pack("<2q", 2**40, -1) + rows).decode()


PICTURE = {"url": "data:image/png;base64,iVBORw0KGgo="}
TENSORS: list[dict[str, Any]] = [
    {"prompt_embeds": embeddings()},
    {"prompt_token_ids": [2**31, -1]},
    {"mm_hashes": ["0"]},
    {"multi_modal_data": {"image": embeddings()}},
    {"multi_modal_uuids": {"image": ["same"]}},
    {"mm_placeholders": {"image": [{"offset": -1, "length": 2**31}]}},
    {"mm_processor_kwargs": {"max_pixels": 2**40}},
    {"media_io_kwargs": {"video": {"num_frames": -1}}},
    {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": embeddings()}]}]},
    {"messages": [{"role": "user", "content": [{"type": "audio_embeds", "audio_embeds": embeddings()}]}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": PICTURE, "uuid": "same"}]}
        ]
    },
]


@pytest.mark.parametrize("fields", TENSORS, ids=lambda fields: next(iter(fields)))
async def test_no_tensor_hash_or_range_of_a_caller_is_taken(web: HttpBench, fields: dict[str, Any]) -> None:
    answer = await web.post(**fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] in ("invalid_request", "unsupported")
    assert web.stages.requests == []


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[int, list[object]]]:
    """A port of this machine where nobody must connect, and who did."""
    connected: list[object] = []

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], connected


async def test_no_request_connects_anywhere(configure: Configure) -> None:
    """Addresses come from the configuration and from members of the stack, never from a request."""

    async with listening() as (port, connected), http_bench(configure(http_gateway())) as b:
        place = {"remote_host": "127.0.0.1", "remote_port": port, "do_remote_prefill": True}
        address = f"tcp://127.0.0.1:{port}"
        fields: list[dict[str, Any]] = [
            {"kv_transfer_params": place},
            {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1},
            {"disaggregated_params": place},
            {"ec_transfer_params": place},
            {"route": {"talker": address, "token2wav": address}},
            {"inbox": address},
            {"callback_url": f"http://127.0.0.1:{port}/"},
        ]
        for each in fields:
            assert (await b.post(**each)).status_code == 400, each
        media = [
            {"type": kind, kind: {"url": f"{scheme}://127.0.0.1:{port}/"}}
            for kind in ("image_url", "video_url", "audio_url")
            for scheme in ("http", "https", "ftp", "tcp")
        ]
        for part in media:
            messages = [{"role": "user", "content": [part]}]
            assert (await b.post(messages=messages)).status_code == 400, part
        raw = await RawClient.connect(b)
        request = msgspec.msgpack.encode({"messages": [{"role": "user", "content": "Hi"}], **fields[4]})
        raw.say(Submit(1, msgspec.Raw(request)))
        assert (await raw.hear()).event.code == "invalid_request"  # type: ignore[union-attr]
        await raw.close()
        headers = {"X-Forwarded-Host": f"127.0.0.1:{port}", "X-Omnirelay-Inbox": address}
        forwarded = await b.http.get(f"http://127.0.0.1:{b.address[1]}/v1/models", headers=headers)
        assert forwarded.status_code == 200
        assert b.stages.requests == []
        assert connected == []


def fields_of(kind: type[msgspec.Struct]) -> Iterator[str]:
    """The names of a message's fields, those of the structs in it among them."""
    for field in msgspec.structs.fields(kind):
        yield field.encode_name
        for part in (field.type, *get_args(field.type)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from fields_of(part)


@pytest.mark.parametrize(
    "union", [GenerateRequest, ThinkerInput, TalkerInput, Token2WavInput, ControlToStage]
)
def test_no_message_of_a_request_has_a_place_for_an_address(union: Any) -> None:
    kinds = [union] if isinstance(union, type) else get_args(union)
    names = {name for kind in kinds for name in fields_of(kind)}
    assert names
    if union in (ThinkerInput, ThinkRequest):
        assert "prompt_token_ids" in names
    words = ("address", "host", "port", "endpoint", "inbox", "url", "path", "callback")
    assert not [name for name in names if name in words or name.endswith(tuple(f"_{word}" for word in words))]


async def test_a_url_that_two_parsers_read_differently_is_fetched_by_neither(configure: Configure) -> None:
    async with listening() as (port, connected):
        config = configure(http_gateway(), {"url_hosts": ["media.example.com"]})
        async with http_bench(config) as b:
            for url in (
                f"https://127.0.0.1:{port}\\@media.example.com/x",
                f"https://127.0.0.1:{port}%5c@media.example.com/x",
                f"https://media.example.com@127.0.0.1:{port}/x",
                f"https://media.example.com:443@127.0.0.1:{port}/x",
                f"https://127.0.0.1:{port}/x#@media.example.com/",
                f"https://media.example.com.127.0.0.1:{port}/x",
            ):
                part = {"type": "image_url", "image_url": {"url": url}}
                answer = await b.post(messages=[{"role": "user", "content": [part]}])
                assert answer.status_code == 400, url
                assert answer.json()["error"]["code"] == "media_unreachable", url
            assert b.stages.requests == []
        assert connected == []


@pytest.mark.parametrize("kind", ["video/jpeg", "video/mp4", "image/jpeg"])
async def test_thousands_of_frames_behind_commas_are_no_video(web: HttpBench, kind: str) -> None:
    frame = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(60)).decode()
    url = f"data:{kind};base64," + ",".join([frame] * 5000)
    part = {"type": "video_url", "video_url": {"url": url}}
    answer = await web.post(messages=[{"role": "user", "content": [part]}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_invalid")
    assert (web.stages.requests, web.process.gateway.held.total) == ([], 0)


async def test_as_many_videos_as_fit_in_a_body_are_not_taken(web: HttpBench) -> None:
    url = "data:video/mp4;base64," + base64.b64encode(b"\0\0\0\x18ftypmp42").decode()
    part = {"type": "video_url", "video_url": {"url": url}}
    for count in (5, 2000):
        answer = await web.post(messages=[{"role": "user", "content": [part] * count}])
        assert answer.status_code in (400, 413), answer.text
        assert answer.json()["error"]["code"] == "media_too_large"
    assert (web.stages.requests, web.process.gateway.held.total) == ([], 0)


async def test_refused_requests_leave_nothing_however_many(configure: Configure) -> None:
    """Not a place in line, not a byte of media, not a record: at the gateway as at the stages."""

    async with http_bench(configure(http_gateway(), max_queued_per_client=4)) as b:
        url = "data:image/png;base64," + base64.b64encode(bytes(1000)).decode()
        part = {"type": "image_url", "image_url": {"url": url}}
        wrong: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": [part] * 40}]},
            {"messages": [{"role": "user", "content": [part]}], "model": "none"},
            {"messages": [{"role": "user", "content": [part]}], "temperature": -1},
            {"messages": HI, "audio": {"voice": "Nobody", "format": "wav"}, "modalities": ["text", "audio"]},
        ]
        for _ in range(10):
            for body in wrong:
                assert (await b.post(**body)).status_code >= 400
        gateway = b.process.gateway
        assert (gateway.held.total, len(gateway._active)) == (0, 0)
        active_requests = ("received", "queued", "thinking", "talking", "synthesizing")
        assert [b.counts.get(state, 0) for state in active_requests] == [0] * 5
        assert b.stages.requests == []
        b.stages.serve(b.encode("Hello"))
        assert (await b.post()).status_code == 200


async def test_what_is_json_and_still_harmful_is_data(web: HttpBench, target: Path) -> None:
    """As jsonpickle, YAML tags and templates would follow it."""
    tags = [
        {"py/object": "os.mkdir", "py/reduce": [{"py/type": "os.mkdir"}, {"py/tuple": [str(target)]}]},
        f"!!python/object/apply:os.mkdir ['{target}']",
        f"{{{{ cycler.__init__.__globals__.os.mkdir('{target}') }}}}",
        urllib.parse.quote(f"$(mkdir {target})"),
        f"$(mkdir {target})",
    ]
    web.stages.serve(web.encode("Hello"))
    for tag in tags:
        text = tag if isinstance(tag, str) else json.dumps(tag)
        answer = await web.post(messages=[{"role": "user", "content": text}])
        assert answer.status_code == 200
        assert (await web.post(messages=tag)).status_code == 400


def test_defaults_listen_on_this_machine_alone() -> None:
    config = Config()
    served = [config.gateway.listen, config.gateway.http, *config.inner_addresses().values()]
    served += [config.stages.thinker.http, config.stages.talker.http, config.stages.token2wav.http]
    assert len(served) == 10
    assert all(address is not None and address.startswith("tcp://127.0.0.1:") for address in served)
