"""All checks in order, and how their findings are shown."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from omnirelay.cli.output import say, say_json
from omnirelay.cli.progress import ProgressLine
from omnirelay.errors import ConfigError, StageStartError
from ops.addresses import overrides
from ops.doctor import access, checkpoint, gpus, limits, machine, network, software
from ops.doctor.finding import Finding, Level, ok, problem, warning
from shared.config import Config, holds_nothing, load_config
from shared.devices import EngineReport
from shared.sharing import parallel

COLOURS: Final[dict[Level, int]] = {"ok": 32, "warning": 33, "problem": 31}
log = logging.getLogger(__name__)
T = TypeVar("T")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Returns:
        1 if there is a problem.
    """
    findings = Examination(arguments).findings()
    problems = sum(finding.level == "problem" for finding in findings)
    if arguments.json:
        say_json(problems=problems, findings=msgspec.to_builtins(findings))
    else:
        for finding in findings:
            say(_shown(finding))
        warnings = sum(finding.level == "warning" for finding in findings)
        say(f"\n{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}")
    return int(problems > 0)


class Examination:
    """All checks in order; one that raises does not prevent the others."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._findings: list[Finding] = []

    def findings(self) -> list[Finding]:
        """Make the checks."""
        report = self._software()
        readings = self._get("machine", machine.read_machine)
        config = self._get("configuration", self._config)
        if config is not None:
            self._stack(config, readings, report)
        if readings is not None:
            self._add("open-files", lambda: machine.check_open_files(readings))
        return self._findings

    def _software(self) -> EngineReport | None:
        needs = self._get("packages", software.project_needs) or []
        self._add("python", lambda: software.check_python(software.requires_python()))
        self._add("packages", lambda: software.check_packages(needs))
        report = self._get("vllm", _load_engine)
        self._add("vllm", lambda: software.check_engine(report))
        return report if isinstance(report, EngineReport) else None

    def _config(self) -> Config | None:
        path: Path | None = self._arguments.config
        source = str(path or "the built-in values")
        try:
            config = load_config(path, os.environ | overrides(self._arguments))
        except ConfigError as error:
            advice = "correct it: `omnirelay config init` lists every key"
            self._findings.append(problem("configuration", str(error), advice))
            return None
        if path is not None and holds_nothing(path):
            what = f"{source} holds no key, so the built-in values and the environment's apply"
            self._findings.append(warning("configuration", what, "look whether it is the right file"))
        else:
            self._findings.append(ok("configuration", f"{source}, with the environment's, is valid"))
        return config

    def _stack(self, config: Config, readings: machine.Machine | None, report: EngineReport | None) -> None:
        """The checks that depend on the configuration."""
        on_cpu = report is None or report.platform == "cpu"
        running = self._get("ports", lambda: network.ask_gateway(config))
        self._add("addresses", lambda: network.check_addresses(config))
        self._add("gateways", lambda: network.check_others(config))
        self._add("keys", lambda: access.check_keys(config))
        self._add("access", lambda: access.check_access(config))
        self._add("ports", lambda: network.check_ports(config, running))
        self._add("calls", lambda: network.check_calls(config))
        self._add("turns", lambda: software.check_turn_model(config))
        model, found = self._get("checkpoint", lambda: checkpoint.examine(config)) or (None, [])
        self._findings += found
        self._add("disk", lambda: machine.check_disk(config, model is not None))
        if report is not None:
            self._add("device", lambda: gpus.check_devices(config, model, report))
        self._add("limits", lambda: limits.check_limits(config, on_cpu))
        if model is not None:
            self._add("limits", lambda: limits.check_cache(config, model, on_cpu))
        if readings is None:
            return
        if model is not None and on_cpu:
            needed = machine.memory_needed(config, model)
            self._add("memory", lambda: machine.check_memory(readings, needed, running is not None))
        self._add("cpu", lambda: machine.check_cpus(config, readings, on_cpu))
        divided = any(parallel(config, stage) > 1 for stage in config.served_stages)
        self._add("shared-memory", lambda: machine.check_shared_memory(readings, divided))

    def _add(self, check: str, make: Callable[[], Iterable[Finding]]) -> None:
        self._findings += self._get(check, lambda: list(make())) or []

    def _get(self, check: str, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except Exception as error:
            log.debug("the check %s failed", check, exc_info=True)
            what = f"could not be checked: {' '.join(repr(error).split())}"
            self._findings.append(warning(check, what, "look into it yourself"))
            return None


def _load_engine() -> EngineReport | StageStartError | None:
    if not software.engine_installed():
        return None
    try:
        with ProgressLine(lambda: "loading vLLM once"):
            return software.load_engine()
    except StageStartError as error:
        return error


def _shown(finding: Finding) -> str:
    level = finding.level.ljust(8)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        level = f"\x1b[{COLOURS[finding.level]}m{level}\x1b[0m"
    advice = f"\n{' ' * 24}do: {finding.advice}" if finding.advice else ""
    return f"{level} {finding.check:14} {finding.what}{advice}"


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
