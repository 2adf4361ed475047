"""The operator's subcommands of ``omnirelay``, and their arguments."""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from omnirelay.cli.main import Commands
from omnirelay.cli.target import add_options
from shared.config.gateway import MAX_GATEWAYS
from shared.messages import MAX_REPLICAS, ROLES, STAGES, Role


def loaded(module: str, function: str = "run") -> Callable[[argparse.Namespace], int]:
    """A function of a module, which is imported at its first call."""

    def run(arguments: argparse.Namespace) -> int:
        status: int = getattr(import_module(module), function)(arguments)
        return status

    return run


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add the subcommands."""
    _add_checkpoint(commands)
    _add_stacks(commands)
    _add_cluster(commands)
    _add_batch(commands)
    _add_demo(commands)
    _add_doctor(commands)
    _add_config(commands)
    _add_keys(commands)
    _add_api_key(commands)


def _add_checkpoint(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("checkpoint", help="make a random checkpoint, or write the trained one")
    parser.add_argument("directory", type=Path, metavar="DIR")
    families = ("qwen2.5-omni", "qwen3-omni")
    parser.add_argument("--family", choices=families, default=families[0], help="its layout")
    parser.add_argument(
        "--size",
        choices=("tiny", "small", "bench", "3b", "speaking"),
        default="tiny",
        help="of a random one, or `speaking`, the trained one (default: tiny)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of its weights")
    parser.set_defaults(run=loaded("ops.checkpoint"))


def _add_stacks(commands: "Commands[argparse.ArgumentParser]") -> None:
    up = commands.add_parser("up", help="run the four processes on this machine until Ctrl-C")
    _add_stack(up)
    serve = commands.add_parser("serve", help="the same as `up`, with the options of `vllm serve`")
    serve.add_argument("model", metavar="MODEL", help="directory, or id of the Hugging Face hub")
    serve.add_argument("--host", metavar="HOST", help="of HTTP (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, metavar="PORT", help="of HTTP (default: 8000)")
    serve.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="further names of the model in the API"
    )
    _add_stack(serve)
    for parser in (up, serve):
        parser.add_argument(
            "--text-only", action="store_true", help="no speech: without talker and token2wav"
        )
        parser.set_defaults(run=loaded("ops.up"))
    restart = commands.add_parser("restart", help="replace processes of `up` one after the other")
    restart.add_argument(
        "process", nargs="?", choices=(*STAGES, "gateway", "all"), default="all", help="which (default: all)"
    )
    _add_stack(restart)
    restart.set_defaults(run=loaded("ops.restart"))


def _add_stack(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``ops.up.overrides`` reads, and nothing for those of other commands."""
    parser.set_defaults(model=None, host=None, port=None, served_model_name=None, text_only=False)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; the defaults without it")
    parser.add_argument(
        "--port-offset", type=int, default=0, metavar="N", help="for a second stack: adds N to all its ports"
    )


def _add_batch(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("batch", help="answer a file of prompts, and resume where it stopped")
    parser.add_argument("prompts", type=Path, metavar="FILE.jsonl", help="one prompt a line, as JSON")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results are written")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML of the stack; the defaults without")
    parser.add_argument("--text-only", action="store_true", help="no speech")
    parser.add_argument("--concurrency", type=_positive, metavar="N", help="requests at once")
    add_options(parser)
    parser.set_defaults(run=loaded("ops.batch"), refuse_usage=parser.error, gateway=None)


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, not {text!r}")
    return int(text)


def _add_demo(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("demo", help="start the stack, ask it something, stop the stack")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.wav", help="default: out/reply.wav; several are numbered"
    )
    parser.add_argument("--verbose", action="store_true", help="show the output of the processes too")
    parser.set_defaults(run=loaded("ops.demo"))


def _add_doctor(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("doctor", help="say what is wrong with this set-up, and what to do")
    _add_stack(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=loaded("ops.doctor"))


def _add_config(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("config", help="show the configuration that applies, or begin one")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print every value, and whether file or environment sets it")
    show.add_argument("--config", type=Path, metavar="FILE", help="YAML; the defaults without it")
    show.set_defaults(run=loaded("ops.config", "show"))
    init = actions.add_parser("init", help="print a configuration with every key and its default")
    init.set_defaults(run=loaded("ops.config", "init"))


def _add_keys(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("keys", help="make keys for the sockets between the processes")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--force", action="store_true", help="replace the keys that are there")
    parser.set_defaults(run=loaded("ops.keys"))


def _add_api_key(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("api-key", help="make a key for a client of the gateway, and print it")
    parser.add_argument("name", metavar="NAME", help="what the key goes by in logs and metrics")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; its gateway.api_keys is added to")
    parser.add_argument("--file", type=Path, metavar="FILE", help="add to this file instead")
    parser.add_argument("--requests-per-second", type=float, metavar="N", help="that the key may begin")
    parser.add_argument("--burst", type=int, metavar="N", help="requests at once, after a pause")
    parser.add_argument("--max-requests", type=int, metavar="N", help="that may be open at once")
    parser.add_argument("--request-bytes", type=int, metavar="N", help="largest request, media included")
    parser.add_argument(
        "--best-priority", type=int, metavar="N", help="most urgent one; smaller is more urgent"
    )
    parser.set_defaults(run=loaded("ops.api_key"))


def _add_cluster(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("cluster", help="run the stack on a Ray cluster: up, status, scale, down")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    up = actions.add_parser("up", help="start gateways and stages, and wait until they are ready")
    up.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML")
    status = actions.add_parser("status", help="show each process, its node and its load")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    scale = actions.add_parser(
        "scale", help="change numbers of gateways or of replicas; those that go finish their requests"
    )
    scale.add_argument("numbers", type=replicas, nargs="+", metavar="STAGE=N", help="e.g. talker=3 gateway=2")
    actions.add_parser("down", help="finish all requests, and stop every process")
    for name, action in actions.choices.items():
        action.set_defaults(run=loaded("ops.cluster.commands", name))
        action.add_argument(
            "--address",
            metavar="HOST:PORT",
            help="of the Ray cluster (default: RAY_ADDRESS, or the one that runs on this node)",
        )


def replicas(text: str) -> tuple[Role, int]:
    """Read ``STAGE=N`` or ``gateway=N``.

    Raises:
        argparse.ArgumentTypeError: It is something else, or a number that there cannot be.
    """
    name, _, number = text.partition("=")
    kind = next((kind for kind in ROLES if kind == name), None)
    most = MAX_GATEWAYS if kind == "gateway" else MAX_REPLICAS
    if kind is None or not number.isdecimal() or not 1 <= int(number) <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not STAGE=N with a stage of {', '.join(STAGES)} and N from 1 to {MAX_REPLICAS}, "
            f"nor gateway=N with N from 1 to {MAX_GATEWAYS}"
        )
    return kind, int(number)
