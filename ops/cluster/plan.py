"""What each process of the stack needs on a Ray cluster: resources, settings, addresses."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from omnirelay.errors import ConfigError
from omnirelay.protocol import tcp_address
from ops.addresses import urls, variables
from shared.config import Config, GatewayAddresses, ProcessPlace
from shared.config.values import is_local
from shared.messages import ROLES, Role, StageName
from shared.sharing import parallel

NAMESPACE: Final = "omnirelay"
"""Of our actors in a Ray cluster, which has one stack."""
CONTROLLER: Final = "controller"
"""The name of the actor that owns the numbers of processes."""
DEFAULT_CPUS: Final = 1.0


def check(config: Config) -> None:
    """Check what holds on one machine and not on many.

    Raises:
        ConfigError: A setting means nothing on another node, or would be wrong there; all are listed.
    """
    gateway = config.gateway
    problems = []
    if config.model is None:
        problems.append("model is not set: name a directory that every node has, or an id on the hub")
    files = {
        "model": config.model if config.model and Path(config.model).is_dir() else None,
        "gateway.api_keys": gateway.api_keys,
        "gateway.tls.certificate": gateway.tls.certificate,
        "gateway.tls.key": gateway.tls.key,
        "gateway.turn_model": None if gateway.turn_model == "auto" else gateway.turn_model,
    }
    problems += [
        f"{key} {path} is relative: nodes have working directories of their own"
        for key, path in files.items()
        if path is not None and not os.path.isabs(path)
    ]
    problems += [
        f"{key} {address} is for processes of one machine: use tcp://HOST:PORT"
        for key, address in config.inner_addresses().items()
        if address.startswith("ipc://")
    ]
    if gateway.others:
        problems.append("gateway.others is not served: on a cluster gateway.replicas says how many there are")
    if config.share_gpus:
        problems.append("share_gpus is for stages of one machine: Ray gives each replica GPUs of its own")
    for stage in config.served_stages:
        problems += _of_stage(config, stage)
    if problems:
        raise ConfigError(f"the configuration does not fit a cluster: {'; '.join(problems)}")


def _of_stage(config: Config, stage: StageName) -> list[str]:
    settings, place, problems = config.stage(stage), config.place(stage), []
    if settings.devices is not None:
        problems.append(
            f"stages.{stage}.devices is set: Ray chooses the GPUs, cluster.{stage}.gpus their number"
        )
    if settings.advertise is not None:
        problems.append(f"stages.{stage}.advertise is set: each replica has an address of its own")
    devices = parallel(config, stage)
    if place.gpus not in (None, 0, devices):
        problems.append(f"cluster.{stage}.gpus must be 0 or {devices}, the devices that share its model")
    highest = place.max_replicas or settings.replicas
    if not place.min_replicas <= settings.replicas <= highest:
        problems.append(
            f"stages.{stage}.replicas must be within cluster.{stage}.min_replicas and max_replicas"
        )
    return problems


def numbers_of(config: Config) -> dict[Role, int]:
    """How many processes of each kind a stack begins with."""
    return {role: config.process(role).replicas for role in config.roles}


def settings_text(config: Config) -> str:
    """The configuration as the YAML that processes on other nodes read, environment overrides included."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True))


def resources_of(config: Config, kind: Role, gpus_there: bool) -> dict[str, Any]:
    """What Ray reserves for a process, as options of an actor.

    An actor is on one node with all that it reserves, so the GPUs of a replica are together.

    Args:
        config: The stack's.
        kind: The process.
        gpus_there: The cluster has GPUs.
    """
    place: ProcessPlace = config.cluster.gateway
    threads, gpus = None, 0
    if kind != "gateway":
        place = config.place(kind)
        threads = config.stage(kind).threads
        devices = parallel(config, kind) if gpus_there else 0
        gpus = devices if config.place(kind).gpus is None else config.place(kind).gpus or 0
    reserved: dict[str, Any] = {"num_cpus": place.cpus or threads or DEFAULT_CPUS, "num_gpus": gpus}
    if place.memory_bytes is not None:
        reserved["memory"] = place.memory_bytes
    if place.resources:
        reserved["resources"] = dict(place.resources)
    return reserved


def actor_name(kind: Role, number: int) -> str:
    """The name of a process in the cluster, ``talker-2``."""
    return f"{kind}-{number}"


def kind_of(actor: str) -> Role | None:
    """The kind of process that an actor of this name runs; None for others."""
    name, _, number = actor.rpartition("-")
    return next((kind for kind in ROLES if kind == name and number.isdecimal()), None)


def number_of(actor: str) -> int:
    """The number in an actor's name."""
    return int(actor.rpartition("-")[2])


def at_host(address: str, host: str, port: int | None = None) -> str:
    """An address with a node's host in place of its own, and another port if one is given."""
    return tcp_address(host, port or address.rpartition(":")[2])


def gateway_addresses(config: Config, number: int, host: str) -> GatewayAddresses:
    """Where the gateway of a number, from 1, meets the stages when it is on a node."""
    own = config.gateway.own_addresses(number)
    events, control = (at_host(own[key] or "", host) for key in ("events", "control"))
    return GatewayAddresses(events=events, control=control)


def gateway_variables(config: Config, number: int, host: str) -> dict[str, str]:
    """Where the gateway of a number listens when it is on a node, as variables for it."""
    met = gateway_addresses(config, number, host)
    own = config.gateway.own_addresses(number) | met.model_dump() | {"replicas": "1"}
    return variables("gateway", own)


def stage_settings(settings: str, gateways: Sequence[GatewayAddresses]) -> str:
    """A stage's configuration in YAML: the stack's, with the gateways where they are, one at least."""
    values = yaml.safe_load(settings) or {}
    first, *others = (each.model_dump() for each in gateways)
    values["gateway"] = {**values.get("gateway", {}), **first, "replicas": 1, "others": others}
    return yaml.safe_dump(values)


def with_gateways(config: Config, number: int) -> Config:
    """The configuration with another number of gateways.

    Raises:
        ConfigError: So many have no ports.
    """
    values = config.model_dump(mode="json", exclude_defaults=True)
    values["gateway"] = {**values.get("gateway", {}), "replicas": number}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"there cannot be {number} gateways: {error.errors()[0]['msg']}") from error


def stage_addresses(config: Config, stage: StageName, host: str, http_port: int) -> dict[str, str]:
    """Where a replica on a node listens, as variables for it; its inbox takes a free port."""
    http = config.stage(stage).http
    if http is not None:
        # Prometheus on another machine may read it only where the configuration says so.
        http = at_host(http, "127.0.0.1" if is_local(http) else host, http_port)
    return variables(stage, {"inbox": tcp_address(host, "*"), "http": http})


def client_addresses(config: Config, number: int, host: str) -> tuple[str, ...]:
    """Where clients reach the gateway of a number when it is on a node, by the scheme of each protocol."""
    return tuple(urls(config, number, lambda own: own if is_local(own) else at_host(own, host)))
