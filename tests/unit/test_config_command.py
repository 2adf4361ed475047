"""``omnirelay config`` prints the configuration, and the example in ``deploy`` is what it prints."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnirelay.cli.main import main
from ops.config import example
from shared.config import Config, is_ours, load_config
from tests.support.children import Output, Patch

EXAMPLE = Path(__file__).parents[2] / "deploy/config.example.yaml"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: Patch) -> None:
    for name in filter(is_ours, list(os.environ)):
        monkeypatch.delenv(name)


def keys(values: Mapping[str, Any], prefix: str = "") -> set[str]:
    return {
        key
        for name, value in values.items()
        for key in (keys(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name})
    }


def test_init_prints_every_key_with_its_default(capsys: Output, tmp_path: Path) -> None:
    assert main(["config", "init"]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "config.yaml"
    file.write_text(printed, encoding="utf-8")
    assert load_config(file, {}) == Config()
    assert keys(yaml.safe_load(printed)) == keys(Config().model_dump(mode="json"))


def test_the_example_is_current_and_loads() -> None:
    # If not: omnirelay config init > deploy/config.example.yaml
    assert EXAMPLE.read_text(encoding="utf-8") == example()
    assert load_config(EXAMPLE, {}) == Config()


def test_comments_say_what_a_key_takes() -> None:
    lines = [line.strip() for line in example().splitlines()]
    for line in (
        "# TLS for clients, over TCP and HTTP: both files or none.",
        "max_active: null  # integer > 0 or null",
        "sample_ratio: 1.0  # number >= 0 and <= 1",
        "log_level: info  # debug, info, warning, error",
        "others: []  # array of at most 16",
    ):
        assert line in lines


def test_show_prints_what_applies_and_who_sets_it(capsys: Output, tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: 'a: b # c'\n"
        "gateway: {limits: {max_active: 3, max_queued: 5}, webrtc: {addresses: [127.0.0.1]},\n"
        "  others: [{events: 'tcp://127.0.0.1:7001', control: 'tcp://127.0.0.1:7002'}]}\n"
        "cluster: {gateway: {resources: {edge: 1.0}}}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("OMNIRELAY_GATEWAY__LIMITS__MAX_QUEUED", "6")
    monkeypatch.setenv("OMNIRELAY_LOG_LEVEL", "info")
    assert main(["config", "show", "--config", str(file)]) == 0
    printed = capsys.readouterr().out
    lines = [line.strip() for line in printed.splitlines()]
    for line in (
        "max_active: 3  # file",
        "max_queued: 6  # environment",
        "log_level: info  # environment",
        "log_format: text  # default",
        "addresses: [127.0.0.1]  # file",
        "resources: {edge: 1.0}  # file",
    ):
        assert line in lines
    shown = tmp_path / "shown.yaml"
    shown.write_text(printed, encoding="utf-8")
    assert load_config(shown, {}) == load_config(file)


def test_show_refuses_what_is_not_valid(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("gateway: {limits: {max_actives: 3}}\n", encoding="utf-8")
    assert main(["config", "show", "--config", str(file)]) == 1
    told = capsys.readouterr()
    assert not told.out
    assert "did you mean gateway.limits.max_active?" in told.err
