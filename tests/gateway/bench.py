"""A gateway with real sockets on free ports, stages imitated at theirs, and clients that say anything."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pytest
import yaml
from tokenizers import Tokenizer

from gateway.access.api_keys import hash_of
from gateway.dispatch.registry import StageRegistry
from gateway.input.fetch import Fetcher
from gateway.input.prompt import PromptBuilder
from gateway.process import GatewayProcess
from omnirelay import AsyncAnswer, AsyncClient, ChatMessage, GenerateRequest
from omnirelay.events import ErrorEvent
from omnirelay.protocol import (
    PROTOCOL_VERSION,
    ClientMessage,
    Hello,
    Refusal,
    Reply,
    ServerMessage,
    Submit,
    Welcome,
    pack,
    parse_tcp,
    read_frame,
)
from shared.config import Config
from shared.messages import STAGES, StageName, ThinkRequest
from tests.gateway.fake_stages import FakeStages, until
from tests.support.ports import free_ports

SCENARIO_S = 90.0

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]
Log = pytest.LogCaptureFixture
Configure = Callable[..., Config]
"""The fixture ``configure``: makes the configuration of a gateway on free ports."""


class KeepingClient(AsyncClient):
    """Keeps its answers, so that those which a test ignores are not cancelled."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept: list[AsyncAnswer] = []

    def chat(self, *arguments: Any, **options: Any) -> AsyncAnswer:
        self.kept.append(super().chat(*arguments, **options))
        return self.kept[-1]


Failure = TypeVar("Failure", bound=Exception)


async def fails(answer: AsyncAnswer, kind: type[Failure], match: str | None = None) -> Failure:
    """The error of an answer, which must be of this class, and say this."""
    with pytest.raises(kind, match=match) as raised:
        await answer.result()
    return raised.value


def make_config(
    directory: Path,
    gateway: dict[str, Any] | None = None,
    media: dict[str, Any] | None = None,
    tracing: dict[str, Any] | None = None,
    **limits: Any,
) -> Config:
    listen, events, control, inbox = (f"tcp://127.0.0.1:{port}" for port in free_ports(4))
    return Config.model_validate(
        {
            "model": str(directory),
            "gateway": {
                "listen": listen,
                "events": events,
                "control": control,
                "http": None,
                "monitor": None,
                # What a lost stage means without a second attempt; with it: recovering.py.
                "resume_attempts": 0,
                # Gateway and stages share a loop here, which large bodies keep busy.
                "heartbeat_timeout_s": 10.0,
                # Imitated stages have no rates.
                "max_start_delay_s": 0,
                "limits": limits,
                **(gateway or {}),
            },
            "media": media or {},
            "stages": {"thinker": {"inbox": inbox}},
            "tracing": tracing or {},
        }
    )


@dataclass
class Bench:
    """A gateway that serves, its imitated stages, and a way to connect."""

    config: Config
    process: GatewayProcess
    stages: FakeStages

    @property
    def listen(self) -> str:
        return self.config.gateway.listen

    @property
    def counts(self) -> dict[str, int]:
        return self.process.status().requests

    @property
    def registry(self) -> StageRegistry:
        return self.process.gateway.registry

    def client(self, reconnect_s: float = 0.0) -> AsyncClient:
        """A client whose answers end with the connection, unless told otherwise; it keeps them."""
        return KeepingClient(self.listen, reconnect_s=reconnect_s)

    @property
    def tokenizer(self) -> Tokenizer:
        prompts: PromptBuilder = self.process._prompts
        return prompts._tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def prompt_of(self, request: ThinkRequest) -> str:
        """All that the model reads."""
        return self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


@asynccontextmanager
async def bench(
    config: Config,
    ready: bool = True,
    alive: Iterable[StageName] = STAGES,
    listening: bool = True,
    fetch: Fetcher | None = None,
) -> AsyncIterator[Bench]:
    """Run a gateway; wait for its stages to be ready, unless told not to.

    With ``listening=False`` the thinker, once it is ready, takes no requests before it is told to.
    """
    process = GatewayProcess(config, fetch)
    await process.start()
    stages = FakeStages(config)
    stages.alive = set(alive)
    try:
        stages.listen()
        await stages.start()
        if ready:
            await until(lambda: process.status().ready, "readiness")
        if not listening:
            await stages.stop_listening()
        yield Bench(config, process, stages)
    finally:
        await stages.stop()
        await process.stop()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario, which must end in time."""

    async def bounded() -> None:
        async with asyncio.timeout(SCENARIO_S):
            await scenario

    asyncio.run(bounded())


class RawClient:
    """A TCP connection that says whatever the test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(
        cls, b: Bench, greet: bool = True, key: str | None = None, source: tuple[str, int] | None = None
    ) -> "RawClient":
        """Connect, and say hello, unless told not to; the bench closes it at its end."""
        client = cls(*await asyncio.open_connection(*parse_tcp(b.listen), local_addr=source))
        b.stages.ends.push_async_callback(client.close)
        if greet:
            client.say(Hello(PROTOCOL_VERSION, key=key))
            welcome = await client.hear()
            assert isinstance(welcome, Welcome)
            assert welcome.resumes
        return client

    def say(self, message: ClientMessage) -> None:
        self.writer.write(pack(message))

    def say_bytes(self, body: bytes) -> None:
        self.writer.write(len(body).to_bytes(4, "big") + body)

    async def hear(self) -> ServerMessage:
        body = await read_frame(self.reader, 2**30)
        return msgspec.msgpack.decode(body, type=ServerMessage)

    async def told(self) -> tuple[int, str, str]:
        """The id of a request, and code and message of the error that is its answer."""
        reply = await self.hear()
        assert isinstance(reply, Reply), reply
        assert isinstance(reply.event, ErrorEvent), reply
        return reply.id, reply.event.code, reply.event.message

    async def refused(self) -> Refusal:
        """The next word that is about no request, which refuses something."""
        while isinstance(heard := await self.hear(), Reply):
            pass
        assert isinstance(heard, Refusal), heard
        return heard

    async def accepted(self) -> int:
        """The id of a request whose first event is no error."""
        reply = await self.hear()
        assert isinstance(reply, Reply), reply
        assert not isinstance(reply.event, ErrorEvent), reply
        return reply.id

    async def closed(self) -> bool:
        """The gateway has hung up without another word."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            # It had not read all that was sent.
            return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            # The gateway hung up first, as it should.
            return


async def serves(b: Bench) -> None:
    """A well-behaved client is still served."""
    async with b.client() as client:
        index = len(b.stages.requests)
        answer = client.chat("Hi")
        await b.stages.answer(await b.stages.request(index), b.encode("Hello"))
        assert (await answer.result()).text == "Hello"


def submit(client_id: int, request: GenerateRequest) -> Submit:
    return Submit(client_id, msgspec.Raw(msgspec.msgpack.encode(request)))


HI = GenerateRequest(messages=[ChatMessage("user", "Hi")])


KEY: Final = "omr_alices-own-key"
OTHER: Final = "omr_bobs-own-key"
BEARER: Final = {"Authorization": f"Bearer {KEY}"}
CHAT: Final = "/v1/chat/completions"


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def keys_file(path: Path, **keys: dict[str, object]) -> Path:
    """A file of keys: what each may do, and under ``key`` the key itself."""
    entries = {name: {"sha256": hash_of(str(entry.pop("key"))), **entry} for name, entry in keys.items()}
    return written(path, yaml.safe_dump(entries))


@asynccontextmanager
async def serving(b: Bench) -> AsyncIterator[None]:
    """Every request is answered with a greeting."""
    b.stages.serve(b.encode("Hello"))
    yield
