"""The arguments of ``omnirelay cluster``; nothing here loads Ray."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ops.cluster.plan import KINDS, Kind
from ops.lazy import loaded
from shared.config.gateway import MAX_GATEWAYS
from shared.messages import MAX_REPLICAS, STAGES

if TYPE_CHECKING:
    from omnirelay.cli.main import Commands


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add the subcommand and its own subcommands."""
    parser = commands.add_parser("cluster", help="run the stack on a Ray cluster: up, status, scale, down")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    up = actions.add_parser("up", help="start gateways and stages, and wait until they are ready")
    up.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML")
    up.set_defaults(run=loaded("ops.cluster.commands", "up"))
    status = actions.add_parser("status", help="show each process, its node and its load")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=loaded("ops.cluster.commands", "status"))
    scale = actions.add_parser(
        "scale", help="change numbers of gateways or of replicas; those that go finish their requests"
    )
    scale.add_argument("numbers", type=replicas, nargs="+", metavar="STAGE=N", help="e.g. talker=3 gateway=2")
    scale.set_defaults(run=loaded("ops.cluster.commands", "scale"))
    down = actions.add_parser("down", help="finish all requests, and stop every process")
    down.set_defaults(run=loaded("ops.cluster.commands", "down"))
    for action in (up, status, scale, down):
        action.add_argument(
            "--address",
            metavar="HOST:PORT",
            help="of the Ray cluster (default: RAY_ADDRESS, or the one that runs on this node)",
        )


def replicas(text: str) -> tuple[Kind, int]:
    """Read ``STAGE=N`` or ``gateway=N``.

    Raises:
        argparse.ArgumentTypeError: It is something else, or a number that there cannot be.
    """
    name, _, number = text.partition("=")
    kind = next((kind for kind in KINDS if kind == name), None)
    most = MAX_GATEWAYS if kind == "gateway" else MAX_REPLICAS
    if kind is None or not number.isdecimal() or not 1 <= int(number) <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not STAGE=N with a stage of {', '.join(STAGES)} and N from 1 to {MAX_REPLICAS}, "
            f"nor gateway=N with N from 1 to {MAX_GATEWAYS}"
        )
    return kind, int(number)
