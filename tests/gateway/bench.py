"""A gateway with real sockets on free ports, and stages imitated at theirs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.input.fetch import Fetcher
from gateway.input.prompt import PromptBuilder
from gateway.process import GatewayProcess
from omnirelay import AsyncAnswer, AsyncClient
from shared.config import Config
from shared.messages import STAGES, StageName
from tests.gateway.fake_stages import FakeStages, until
from tests.support.ports import free_ports

SCENARIO_S = 90.0

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

    def client(self, reconnect_s: float = 0.0) -> AsyncClient:
        """A client whose answers end with the connection, unless told otherwise; it keeps them."""
        return KeepingClient(self.listen, reconnect_s=reconnect_s)

    def encode(self, text: str) -> list[int]:
        prompts: PromptBuilder = self.process._prompts
        return prompts._tokenizer.encode(text).ids


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
