"""Fixtures of the gateway's tests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from omnirelay import AsyncClient
from shared.config import Config
from shared.messages import STAGES
from tests.gateway.bench import KEY, OTHER, Bench, Configure, RawClient, bench, keys_file, make_config
from tests.gateway.checkpoint_dir import make_checkpoint_dir
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway, speaking
from tests.gateway.realtime import ANSWER, CHUNKS, idle, talking
from tests.gateway.scripted import Script
from tests.support.children import ROOT
from tests.support.ports import free_ports

KEYS = ["GATEWAY__LISTEN", "GATEWAY__EVENTS", "GATEWAY__CONTROL", "GATEWAY__HTTP", "GATEWAY__MONITOR"]
KEYS += [f"STAGES__{stage.upper()}__{key}" for stage in STAGES for key in ("INBOX", "HTTP")]


class _Hurried:
    """``asyncio`` for uvicorn, which waits a tenth of a second at its end, and up to another before it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@pytest.fixture(autouse=True)
def _hurried_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.server.asyncio", _Hurried())


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint_dir(tmp_path_factory.mktemp("gateway") / "checkpoint")


@pytest.fixture
def configure(checkpoint_dir: Path) -> Configure:
    def configured(
        gateway: dict[str, Any] | None = None, media: dict[str, Any] | None = None, **others: Any
    ) -> Config:
        return make_config(checkpoint_dir, gateway, media, **others)

    return configured


@pytest.fixture
async def tcp(configure: Configure, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A gateway that serves TCP, with stages that are ready: by default, or as its file of tests wants it."""
    async with bench(configure(getattr(request.module, "GATEWAY", None))) as b:
        yield b


@pytest.fixture
def script(tcp: Bench) -> Script:
    return Script(tcp)


@pytest.fixture
async def served(tcp: Bench, request: pytest.FixtureRequest) -> Bench:
    """That gateway, whose stages answer every request with a greeting."""
    tcp.stages.serve(tcp.encode(getattr(request.module, "GREETING", "Hello there")))
    return tcp


@pytest.fixture
async def client(tcp: Bench) -> AsyncIterator[AsyncClient]:
    """A client of that gateway."""
    async with tcp.client() as connected:
        yield connected


@pytest.fixture
async def raw(tcp: Bench) -> RawClient:
    """A connection to that gateway, which says whatever the test wants."""
    return await RawClient.connect(tcp)


@pytest.fixture
async def web(configure: Configure, request: pytest.FixtureRequest) -> AsyncIterator[HttpBench]:
    """A gateway that serves HTTP as well."""
    async with http_bench(configure(http_gateway(**getattr(request.module, "GATEWAY", {})))) as b:
        yield b


@pytest.fixture
async def roomy(web: HttpBench) -> HttpBench:
    """That gateway, with positions for the description of a function."""
    web.stages.max_positions = 4096
    await until(lambda: web.registry.max_positions("thinker") == 4096)
    return web


@pytest.fixture
async def answers(web: HttpBench) -> AsyncIterator[None]:
    """Every request to that gateway is answered with the same text and speech."""
    async with speaking(web, ANSWER, CHUNKS):
        yield


@pytest.fixture(name="c")
async def _session(web: HttpBench) -> AsyncIterator[Connection]:
    """A realtime session of that gateway, of a client that commits; nothing is held behind it."""
    async with talking(web) as connection:
        yield connection
    await idle(web)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """The path of a file with the API keys of two clients."""
    return str(keys_file(tmp_path / "keys.yaml", alice={"key": KEY}, bob={"key": OTHER}))


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are begun anew at once."""
    monkeypatch.setattr("gateway.dispatch.dispatcher.PAUSE_S", 0.0)


@pytest.fixture
def place(tmp_path: Path, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose ``services`` are imitations, and an environment of free ports.

    Its processes are not measured: they start in two thirds of the time.  And
    at the first call into a file coverage takes a lock; the handler of a signal that comes then waits for it.
    """
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    for stage in STAGES:
        package = tmp_path / "services" / stage
        package.mkdir(parents=True)
        # A regular package, or the real one further down the path would be taken before it; what it lacks
        # comes from there, and not from whatever tree is installed.
        (package.parent / "__init__.py").write_text(f"__path__.append({str(ROOT / 'services')!r})\n")
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(
            f"from tests.gateway.fake_stage_process import run\nrun({stage!r})\n"
        )
    for key, port in zip(KEYS, free_ports(len(KEYS)), strict=True):
        monkeypatch.setenv(f"OMNIRELAY_{key}", f"tcp://127.0.0.1:{port}")
    # Imitated stages have no rates.
    monkeypatch.setenv("OMNIRELAY_GATEWAY__MAX_START_DELAY_S", "0")
    monkeypatch.setenv("OMNI_MODEL", str(checkpoint_dir))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path
