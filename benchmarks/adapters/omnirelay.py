"""OmniRelay: the gateway and the three stages in processes of their own, asked over TCP."""

import asyncio
import os
import random
import socket
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, Self
from unittest import mock

import yaml

from benchmarks.adapters import slowed
from benchmarks.adapters.stamps import Stamps
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
from ops.launcher import MODULES, Stack, running
from ops.replicas import HTTP_PORTS_APART
from shared.config import Config
from shared.messages import STAGES, StageName

MOST_CODEC_TOKENS: Final = 6_500
MOST_TEXT_TOKENS: Final = 1_600
KV_CACHE_BYTES: Final = 2**30
"""Room for eight answers of a minute on the ``bench`` checkpoint."""
_PORTS: Final = range(20_000, 32_000)
"""Below the range that Linux takes ports from."""
Changes = Mapping[StageName, Mapping[str, Any]]
_MODULES: Final = {**MODULES, "token2wav": "benchmarks.adapters.stamped_token2wav"}
_SLOWED: Final = {name: f"{slowed.__name__}.{name}" for name in MODULES}


class OmniRelay:
    """The stack, started as ``omnirelay up`` starts it, except that token2wav notes when it sends.

    Args:
        model: Directory of the checkpoint.
        directory: Where its configuration is written.
        changes: What differs from the defaults in the configuration of stages, by stage.
        most_clients: Requests that are worked on at once; None for the default.
        restart: Stages that end are started again, as with ``omnirelay up``; without, they are missed.
        slower: Speech lasts so many times as long, and times are given as if it did not; divides 50.
    """

    name = "omnirelay"

    def __init__(
        self,
        model: Path,
        directory: Path,
        changes: Changes | None = None,
        *,
        most_clients: int | None = None,
        restart: bool = False,
        slower: int = 1,
    ) -> None:
        self._restart = restart
        self._slower = slower
        self.pids: dict[str, int] = {}
        self._path = directory / "omnirelay.yaml"
        values = configuration(model, changes or {})
        _slow_down(values, slower)
        if most_clients is not None:
            values["gateway"]["limits"]["max_active"] = most_clients
            for stage in values["stages"].values():
                stage.setdefault("engine", {})["max_num_seqs"] = most_clients
        self._path.write_text(yaml.safe_dump(values), encoding="utf-8")
        self._config = Config.model_validate(values)
        self._stamps = Stamps(directory / "stamps")
        self._closing = AsyncExitStack()

    @property
    def address(self) -> str:
        """Where clients ask."""
        return self._config.gateway.listen

    async def __aenter__(self) -> Self:
        """Start the processes, and wait until all are ready."""
        self._closing.enter_context(self._stamps)
        modules = _MODULES if self._slower == 1 else _SLOWED
        if self._slower > 1:
            self._closing.enter_context(mock.patch.dict(os.environ, {slowed.VARIABLE: str(self._slower)}))
        stack = Stack(self._config, self._path, show=lambda *_: None, modules=modules)
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
            sent = time.monotonic()
            answer = await self._read(client.chat(request_of(workload, index)), index, sent, heard)
            return answer.on_faster_clock(self._slower)

    async def _read(
        self, events: AsyncAnswer, index: int, sent: float, heard: asyncio.Future[float] | None
    ) -> MeasuredAnswer:
        """Note when each event comes."""
        first_text = 0.0
        start_delay_s = 0.0
        came: list[tuple[int, float, int]] = []
        try:
            async for event in events:
                now = time.monotonic()
                if isinstance(event, TextEvent):
                    first_text = first_text or now
                elif isinstance(event, AudioEvent):
                    start_delay_s = start_delay_s or event.start_delay_ms / 1000
                    came.append((event.seq, now, event.samples.size))
                    if heard is not None and not heard.done() and event.samples.size:
                        heard.set_result(now - sent)
                elif isinstance(event, DoneEvent):
                    made = self._stamps.of(event.request_id)
                    return MeasuredAnswer(
                        index=index,
                        sent=sent,
                        first_text=first_text,
                        pieces=[(at, samples) for _, at, samples in came],
                        made=[made[seq] for seq, _, _ in came],
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
            host, _, port = (self._config.stage(stage).http or "").rpartition(":")
            for number in range(self._config.stage(stage).replicas):
                addresses[f"{stage} {number + 1}"] = f"{host}:{int(port) + HTTP_PORTS_APART * number}"
        return await scrape(addresses)


def request_of(workload: Workload, index: int) -> GenerateRequest:
    """The request that asks a prompt of a workload, its lengths forced."""
    return GenerateRequest(
        prompt_token_ids=workload.prompt(index),
        speaker=SPEAKER,
        seed=SEED,
        text_sampling=forced(workload.text_tokens),
        codec_sampling=forced(workload.codec_tokens),
    )


def forced(tokens: int) -> SamplingOverrides:
    """Return what makes an answer of this length."""
    return SamplingOverrides(max_tokens=tokens, min_tokens=tokens, temperature=0.0)


def configuration(model: Path, changes: Changes) -> dict[str, Any]:
    """Return the defaults, on free addresses, with room for the longest answers that are measured."""
    listen, events, control, http, monitor, *others = free_addresses(5 + 2 * len(STAGES))
    stages: dict[str, dict[str, Any]] = {
        name: {"inbox": inbox, "http": page}
        for name, inbox, page in zip(STAGES, others[::2], others[1::2], strict=True)
    }
    for name in ("thinker", "talker"):
        stages[name]["engine"] = {"kv_cache_memory_bytes": KV_CACHE_BYTES}
    for name, values in changes.items():
        stages[name] |= values
    limits = {"max_codec_tokens": MOST_CODEC_TOKENS, "max_text_tokens": MOST_TEXT_TOKENS}
    return {
        "model": str(model),
        "log_level": "warning",
        "gateway": {
            "listen": listen,
            "events": events,
            "control": control,
            "http": http,
            "monitor": monitor,
            "limits": limits,
        },
        "stages": stages,
    }


def _slow_down(values: dict[str, Any], slower: int) -> None:
    """Lengthen what the configuration has in seconds of listening."""
    defaults = Config()
    stages = defaults.stages.model_dump()
    if slower > 1:
        values["gateway"]["max_start_delay_s"] = slower * defaults.gateway.max_start_delay_s
        for name in STAGES:
            values["stages"][name].setdefault("playback_margin_s", slower * stages[name]["playback_margin_s"])


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
