"""The actor that owns the numbers of processes: starts them, scales them, lets them finish."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import ray
import yaml

from ops.cluster import plan
from ops.cluster.actors import Launch, ProcessActor, actors, answer, essential
from ops.cluster.autoscaling import Autoscaler, Bounds, StackSample
from ops.cluster.keys import KeyFiles, keys_for
from ops.cluster.members import GatewayReport, Member, Placed, member, sample_of
from ops.cluster.plan import NAMESPACE
from ops.console import announce
from shared.config import Config
from shared.messages import Role, StageName
from shared.sharing import batch_of

LOOK_S: Final = 2.0
"""Time between two looks at the stack."""
GRACE_S: Final = 30.0
"""How much longer than its requests a process may take to end."""
ACTOR: Final[dict[str, Any]] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "max_restarts": -1,
    "scheduling_strategy": "SPREAD",
}
"""Options of all actors: they outlive the command, come back elsewhere, and are spread over the nodes."""


class Controller:
    """Made again after a loss, it finds the actors that there are, and goes on with these.

    Args:
        settings: The configuration, in YAML.
        keys: Key files of all processes.
        gpus_there: The cluster has GPUs.
    """

    def __init__(self, settings: str, keys: KeyFiles, gpus_there: bool) -> None:
        self._settings = settings
        self._config = Config.model_validate(yaml.safe_load(settings) or {})
        self._keys = keys
        self._gpus_there = gpus_there
        self._draining: dict[str, asyncio.Task[None]] = {}
        # By name: how often a process ended by itself, how the last time, and its last lines.
        self._ended: dict[str, tuple[int, str, tuple[str, ...]]] = {}
        self._autoscaler = Autoscaler(
            _bounds(self._config, not gpus_there),
            self._config.cluster.scale_up_after_s,
            self._config.cluster.scale_down_after_s,
        )
        # Gaps in playback: those that each gateway counted by its last answer, and all since this began.
        self._underruns: dict[str, int] = {}
        self._gaps = 0
        self._tending = essential(self._tend())

    async def start(self) -> None:
        """Start all processes; those that a controller lost meanwhile has started stay as they are."""
        there = actors()
        for kind, count in plan.numbers_of(self._config).items():
            for number in range(1, count + 1):
                if plan.actor_name(kind, number) not in there:
                    self._create(kind, number)

    async def settings(self) -> str:
        """The stack's configuration, in YAML."""
        return self._settings

    async def members(self) -> list[Member]:
        """Every process of the stack."""
        return (await self._look())[0]

    async def scale(self, numbers: Mapping[Role, int]) -> None:
        """Begin to change the numbers of processes; those that go finish their requests first."""
        for kind, number in numbers.items():
            self._set(kind, number)

    async def ended(self, name: str, ending: str, tail: tuple[str, ...]) -> None:
        """Record that a process ended by itself; Ray is about to restart it."""
        announce(f"{name} {ending}: it is started again", logging.WARNING)
        self._ended[name] = (self._ended.get(name, (0,))[0] + 1, ending, tail)

    async def stop(self) -> None:
        """Let the gateways finish all requests, then stop the stages."""
        self._tending.cancel()
        names = actors()
        gateways = [name for name in names if plan.kind_of(name) == "gateway"]
        for group in (gateways, [name for name in names if name not in gateways]):
            for name in group:
                self._drain(name)
            await asyncio.gather(*(self._draining[name] for name in group))

    def _create(self, kind: Role, number: int) -> None:
        name = plan.actor_name(kind, number)
        # One of this name may have ended a moment ago.
        self._draining.pop(name, None)
        self._ended.pop(name, None)
        launch = Launch(kind, name, self._settings, keys_for(kind, self._keys))
        reserved = plan.resources_of(self._config, kind, self._gpus_there)
        ray.remote(ProcessActor).options(name=name, **ACTOR, **reserved).remote(launch)
        announce(f"{name} is to be placed")

    def _set(self, kind: Role, number: int) -> None:
        """Create processes under new numbers, or drain the newest ones."""
        ours, staying = actors(kind), self._staying(kind)
        free = (each for each in range(1, len(ours) + number + 1) if plan.actor_name(kind, each) not in ours)
        for _ in range(number - len(staying)):
            self._create(kind, next(free))
        for name in staying[number:]:
            self._drain(name)

    def _staying(self, kind: Role) -> list[str]:
        return [name for name in actors(kind) if name not in self._draining]

    def _drain(self, name: str) -> None:
        if name not in self._draining:
            self._draining[name] = asyncio.create_task(self._end(name))

    async def _end(self, name: str) -> None:
        """Let a process finish its requests, and free its resources."""
        announce(f"{name} is to end")
        kind = plan.kind_of(name)
        if kind is not None and await answer(name, "report") is not None:
            await answer(name, "stop", self._config.process(kind).drain_s + GRACE_S)
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        except ValueError:
            announce(f"{name} is gone already")

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            members, reports = await self._look()
            for name in self._draining.keys() - {each.name for each in members}:
                del self._draining[name]
            for each in members:
                # GatewayReport to go by a controller that was lost meanwhile.
                if each.placed is not None and each.placed.report.state == "stopping":
                    self._drain(each.name)
            if reports:
                self._scale_by_rule(members, reports)

    def _scale_by_rule(self, members: list[Member], reports: Mapping[str, GatewayReport]) -> None:
        stages = {stage: sample_of(stage, members) for stage in self._config.served_stages}
        queued = sum(each.status.requests.get("queued", 0) for each in reports.values())
        for name, each in reports.items():
            # A gateway that is new or has been started again counts from zero.
            self._gaps += max(0, each.underruns - self._underruns.get(name, each.underruns))
            self._underruns[name] = each.underruns
        look = StackSample(time.monotonic(), queued, self._gaps, stages)
        for stage, number in self._autoscaler.wanted(look).items():
            # A command may have set another number while the processes were asked.
            if len(self._staying(stage)) == stages[stage].replicas:
                announce(f"{stage}: {number} replicas instead of {stages[stage].replicas}")
                self._set(stage, number)

    async def _look(self) -> tuple[list[Member], Mapping[str, GatewayReport]]:
        """Every process, and what the gateways tell that answer."""
        names, gateways = actors(), actors("gateway")
        answers = await asyncio.gather(
            *(answer(name, "ask") for name in gateways), *(answer(name, "report") for name in names)
        )
        reports: dict[str, GatewayReport] = {
            name: each for name, each in zip(gateways, answers, strict=False) if each is not None
        }
        statuses = {name: each.status for name, each in reports.items()}
        members = [
            member(name, kind, name in self._draining, self._with_past(place), statuses)
            for name, place in zip(names, answers[len(gateways) :], strict=True)
            if (kind := plan.kind_of(name)) is not None
        ]
        return members, reports

    def _with_past(self, placed: Placed | None) -> Placed | None:
        """Add how the process has ended before."""
        if placed is None or placed.name not in self._ended:
            return placed
        restarts, ending, tail = self._ended[placed.name]
        return replace(placed, report=replace(placed.report, restarts=restarts, ending=ending, tail=tail))


def _bounds(config: Config, on_cpu: bool) -> dict[StageName, Bounds]:
    """Of the stages that are scaled by the rule."""
    places = {stage: config.place(stage) for stage in config.served_stages}
    return {
        stage: Bounds(place.min_replicas, place.max_replicas, batch_of(config, stage, on_cpu))
        for stage, place in places.items()
        if place.max_replicas is not None
    }
