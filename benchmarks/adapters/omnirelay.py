"""OmniRelay: the gateway and the three stages in processes of their own, asked over TCP."""

import asyncio
import random
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, Self

import yaml

from benchmarks.measure.answer import MeasuredAnswer
from benchmarks.measure.counters import Counters, scrape
from benchmarks.measure.workload import SEED, SPEAKER, Workload
from omnirelay import (
    AsyncAnswer,
    AsyncClient,
    AudioEvent,
    DoneEvent,
    GenerateRequest,
    SamplingOverrides,
    TextEvent,
)
from omnirelay.errors import OmniRelayError
from ops.launcher import Stack, running
from ops.omni.stack import merged
from services.families.known import family_of
from services.families.memory import DTYPE_BYTES, dtype_of
from shared.checkpoints import read_config
from shared.config import Config
from shared.engine_defaults import CPU_BLOCK_SIZE
from shared.messages import STAGES

LIMITS: Final = {"max_codec_tokens": 6_500, "max_text_tokens": 1_600}
KV_CACHE_BYTES: Final = 2**30
"""Room for eight answers of a minute on the ``bench`` checkpoint; more, if the longest request needs it."""
_PORTS: Final = range(20_000, 32_000)
"""Below the range that Linux takes ports from."""
Changes = Mapping[str, Any]
"""Values of the configuration that differ, nested as there."""


class OmniRelay:
    """The stack, started as ``omnirelay up`` starts it.

    Args:
        model: Directory of the checkpoint.
        changes: What differs from the defaults in the configuration.
        restart: Stages that end are started again, as with ``omnirelay up``.
    """

    name = "omnirelay"

    def __init__(self, model: Path, changes: Changes | None = None, *, restart: bool = False) -> None:
        self._restart = restart
        self.pids: dict[str, int] = {}
        self._values = merged(configuration(model), changes or {})
        self._config = Config.model_validate(self._values)
        self._closing = AsyncExitStack()

    @property
    def address(self) -> str:
        """Where clients ask over TCP."""
        return self._config.gateway.listen

    @property
    def url(self) -> str:
        """Where clients ask over HTTP."""
        return str(self._config.gateway.http).replace("tcp:", "http:")

    async def __aenter__(self) -> Self:
        """Start the processes, and wait until all are ready."""
        directory = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
        path = directory / "omnirelay.yaml"
        path.write_text(yaml.safe_dump(self._values), encoding="utf-8")
        stack = Stack(self._config, path, show=lambda *_: None)
        report = await self._closing.enter_async_context(running(stack))
        if self._restart:
            watch = asyncio.create_task(stack.watch())
            self._closing.callback(watch.cancel)
        self.pids = {"gateway": report.gateway.pid}
        for stage in report.stages:
            others = sum(name.startswith(stage.name) for name in self.pids)
            if stage.pid is not None:
                self.pids[f"{stage.name} {others + 1}" if others else stage.name] = stage.pid
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the processes."""
        await self._closing.aclose()

    async def answer(
        self, workload: Workload, index: int, heard: asyncio.Future[float] | None = None
    ) -> MeasuredAnswer:
        """Ask over a connection of its own; if the caller is cancelled, so is the request.

        Raises:
            OmniRelayError: The request failed.
        """
        async with AsyncClient(self.address) as client:
            return await self.measured(client.chat(request_of(workload, index)), index, heard)

    async def measured(
        self, events: AsyncAnswer, index: int = 0, heard: asyncio.Future[float] | None = None
    ) -> MeasuredAnswer:
        """Note when each event of a request that is being sent comes.

        Raises:
            OmniRelayError: The request failed.
        """
        sent = time.monotonic()
        first_text = start_delay_s = 0.0
        pieces: list[tuple[float, int]] = []
        try:
            async for event in events:
                now = time.monotonic()
                if isinstance(event, TextEvent):
                    first_text = first_text or now
                elif isinstance(event, AudioEvent):
                    start_delay_s = start_delay_s or event.start_delay_ms / 1000
                    pieces.append((now, event.samples.size))
                    if heard is not None and not heard.done() and event.samples.size:
                        heard.set_result(now - sent)
                elif isinstance(event, DoneEvent):
                    return MeasuredAnswer(
                        index=index,
                        sent=sent,
                        first_text=first_text,
                        pieces=pieces,
                        start_delay_s=start_delay_s,
                        done=now,
                        text_ids=event.text_token_ids,
                        codec_ids=event.codec_token_ids,
                    )
        except asyncio.CancelledError:
            events.cancel()
            raise
        raise OmniRelayError("the answer had no end")

    async def counters(self) -> Counters:
        """The metrics of all four processes."""
        addresses = {"gateway": self._config.gateway.http or ""}
        for stage in STAGES:
            config = self._config.stage(stage)
            for number in range(1, config.replicas + 1):
                addresses[f"{stage} {number}"] = config.own_addresses(number)["http"] or ""
        return await scrape(addresses)


def request_of(workload: Workload, index: int) -> GenerateRequest:
    """The request that asks a prompt of a workload, its lengths forced."""
    return GenerateRequest(
        prompt_token_ids=workload.prompt(index),
        speaker=SPEAKER,
        seed=SEED,
        text_sampling=_forced(workload.text_tokens),
        codec_sampling=_forced(workload.codec_tokens),
    )


def _forced(tokens: int) -> SamplingOverrides:
    return SamplingOverrides(max_tokens=tokens, min_tokens=tokens, temperature=0.0)


def configuration(model: Path) -> dict[str, Any]:
    """Return the defaults, on free addresses, with room for the longest answers that are measured."""
    names = ("listen", "events", "control", "http", "monitor")
    addresses = free_addresses(len(names) + 2 * len(STAGES))
    gateway: dict[str, Any] = dict(zip(names, addresses, strict=False))
    stages: dict[str, dict[str, Any]] = {
        stage: {"inbox": addresses.pop(), "http": addresses.pop()} for stage in STAGES
    }
    config = read_config(model)
    for name, each in family_of(config).paged(config).items():
        number = DTYPE_BYTES.get(dtype_of(config), DTYPE_BYTES["float32"])
        least = each.elements * number * (each.positions + CPU_BLOCK_SIZE)
        stages[name]["engine"] = {"kv_cache_memory_bytes": max(KV_CACHE_BYTES, least)}
    return {
        "model": str(model),
        "log_level": "warning",
        "gateway": gateway | {"limits": dict(LIMITS)},
        "stages": stages,
    }


def free_addresses(count: int) -> list[str]:
    """Return addresses on the loopback where nothing listens.

    Not asked of the kernel, which would give them to connections, too, before somebody listens.
    """
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            break
    return [f"tcp://127.0.0.1:{port}" for port in ports]
