"""compose.yaml, the images and their programs say what the configuration and the package say.

What needs Docker itself is in ``tests/compose``.
"""

import http.server
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import Config, load_config
from shared.messages import STAGES
from shared.sharing import stages_on
from tests.support.children import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
GPU: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text(encoding="utf-8"))
MPS: dict[str, Any] = yaml.safe_load((ROOT / "compose.mps.yaml").read_text(encoding="utf-8"))
GATEWAYS: dict[str, Any] = yaml.safe_load((ROOT / "compose.gateways.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = (*STAGES, "gateway")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def config_of(service: str, *files: dict[str, Any]) -> Config:
    """What the process of a service reads from its environment; unknown keys are errors."""
    environment: dict[str, str] = {}
    for file in files:
        values = file["services"].get(service, {}).get("environment", {})
        environment |= {key: str(value) for key, value in values.items()}
    return load_config(environment=environment)


def port(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


def watched(service: str) -> int:
    """The port where a service serves health checks and metrics."""
    config = config_of(service, COMPOSE)
    return port(config.gateway.monitor if service == "gateway" else config.stage(service).http)  # type: ignore[arg-type]


def test_prometheus_scrapes_the_four_processes() -> None:
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    targets = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert sorted(targets) == sorted(f"{name}:{watched(name)}" for name in OURS)


def test_prometheus_scrapes_the_second_gateway_where_there_is_one() -> None:
    (mount,) = GATEWAYS["services"]["prometheus"]["volumes"]
    folder, place, _ = mount.split(":")
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    (files,) = scraped["scrape_configs"][0]["file_sd_configs"]
    assert files["files"] == [f"{place}/*.yml"]
    found = [yaml.safe_load(each.read_text(encoding="utf-8")) for each in (ROOT / folder).glob("*.yml")]
    assert found == [[{"targets": [f"gateway-2:{watched('gateway')}"]}]]


def test_only_this_machine_reaches_what_is_published() -> None:
    published = [entry for service in SERVICES.values() for entry in service.get("ports", [])]
    assert all(re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z_]+:-\d+\}:\d+", entry) for entry in published)
    gateway = Config().gateway
    assert [port(entry) for entry in SERVICES["gateway"]["ports"]] == [
        port(gateway.listen),
        port(gateway.http),
    ]
    assert not [name for name in STAGES if "ports" in SERVICES[name]]


@pytest.mark.parametrize("service", OURS)
def test_processes_do_without_keys_because_their_network_leads_nowhere(service: str) -> None:
    assert config_of(service, COMPOSE).security.internal_network
    assert COMPOSE["networks"]["stages"] == {"internal": True}
    ours = {*OURS, "checkpoint", "prometheus"}
    assert {name for name in SERVICES if "stages" in SERVICES[name]["networks"]} == ours


def test_all_stages_use_the_multi_process_service() -> None:
    stages = {name: each for name, each in MPS["services"].items() if name != "mps"}
    assert set(stages) == set(STAGES)
    shared = "CUDA_MPS_PIPE_DIRECTORY"
    (pipes,) = {each["environment"][shared] for each in MPS["services"].values()}
    for name, each in stages.items():
        assert each["ipc"] == "service:mps"
        volumes = [*MPS["services"]["mps"]["volumes"], *GPU["services"][name]["volumes"]]
        assert [pipes.startswith(volume.partition(":")[2]) for volume in volumes].count(True) == 2


@pytest.mark.parametrize("service", [*SERVICES, "mps"])
def test_every_container_is_bounded(service: str) -> None:
    settings = (MPS["services"] | SERVICES)[service]
    assert settings["read_only"]
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges"]
    assert set(settings["deploy"]["resources"]["limits"]) == {"memory", "pids"}
    assert settings["restart"] == ("no" if service == "checkpoint" else "unless-stopped")


def test_images_are_named_by_a_version() -> None:
    images = [
        each["image"] for file in (COMPOSE, GPU, MPS) for each in file["services"].values() if "image" in each
    ]
    dockerfile = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    images += [
        name
        for name in re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
        if name not in stages and name != "scratch" and "$" not in name
    ]
    assert images
    for image in images:
        name, _, tag = image.partition(":")
        assert re.match(r"v?\d", tag), image
        assert not name.startswith("omnirelay-") or tag.removesuffix("-gpu") == VERSION, image


def test_every_file_that_names_a_version_of_ours_names_that_of_the_package() -> None:
    files = [*ROOT.glob("compose*.yaml"), *(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "docs").glob("*.md")]
    pattern = r"\bomnirelay-(?:gateway|stages)(?::|, newTag: )(\d[\w.]*)"
    named = {file: re.findall(pattern, file.read_text(encoding="utf-8")) for file in files}
    assert {tag for tags in named.values() for tag in tags} == {VERSION}
    assert {file.name for file in files if named[file]} >= {
        "compose.yaml", "compose.gateways.yaml", "compose.gpu.yaml", "compose.mps.yaml", "kustomization.yaml"
    }  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    client = tomllib.loads((ROOT / "deploy/client/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert client["version"] == VERSION
    assert f"omnirelay=={VERSION}" in project["dependencies"]
    dockerfile = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    assert f"\nARG VERSION={VERSION}\n" in dockerfile
    assert dockerfile.count("ARG VERSION\nLABEL org.opencontainers.image.title=omnirelay-") == 2
    released = re.findall(
        r"^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert released[0] == VERSION
    upgrading = (ROOT / "docs/upgrading.md").read_text(encoding="utf-8")
    assert f"## From {released[1]} to {VERSION}\n" in upgrading


def run(program: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run one of the programs that the images have."""
    return subprocess.run(
        [sys.executable, ROOT / "deploy" / program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), **environment},
    )


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An HTTP server that says in its path which status it gives."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(self.path[1:]))
            self.end_headers()
            self.wfile.write(b"the reason")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1), (404, 1)])
def test_health_is_the_status_of_the_answer(endpoint: str, status: int, exit_code: int) -> None:
    told = run("health.py", f"{endpoint}/{status}")
    assert (told.returncode, told.stdout) == (exit_code, f"{status} the reason\n")


def test_nobody_there_is_not_healthy() -> None:
    told = run("health.py", "http://127.0.0.1:1/readyz")
    assert told.returncode == 1
    assert told.stdout.startswith("no answer: ")


def test_a_complete_checkpoint_is_left_as_it_is(tiny_checkpoint: Path) -> None:
    told = run("prepare.py", OMNI_MODEL=str(tiny_checkpoint))
    assert (told.returncode, told.stdout) == (0, f"the checkpoint in {tiny_checkpoint} is complete\n")


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    told = run("prepare.py", OMNI_MODEL=str(tmp_path / "none"))
    assert told.returncode == 1
    assert told.stderr.startswith(f"omnirelay: checkpoint_invalid: no checkpoint in {tmp_path}/none")


@pytest.mark.parametrize("service", OURS)
def test_stages_on_one_gpu_know_of_each_other(service: str) -> None:
    """By default all compute on the first; for others only their numbers have to be given."""
    environment = GPU["services"][service]["environment"]
    config = config_of(service, COMPOSE, {"services": {service: {"environment": resolved(environment)}}})
    assert config.share_gpus
    assert stages_on(config, "0", 1, None) == list(STAGES)
    apart = resolved(environment, TALKER_GPU="1", TOKEN2WAV_GPU="2")
    config = config_of(service, COMPOSE, {"services": {service: {"environment": apart}}})
    assert [stages_on(config, device, 3, None) for device in "012"] == [[stage] for stage in STAGES]


def resolved(environment: dict[str, Any], **chosen: str) -> dict[str, Any]:
    """An environment as Compose makes it of its variables."""
    variable = re.compile(r"\$\{([A-Z0-9_]+):-([^}]*)\}")
    return {
        name: variable.sub(lambda found: chosen.get(found[1], found[2]), str(value))
        for name, value in environment.items()
        if value is not None
    }


@pytest.mark.parametrize("service", OURS)
def test_who_is_told_to_stop_has_time_for_it(service: str) -> None:
    config = config_of(service, COMPOSE, GPU)
    drain_s = config.gateway.drain_s if service == "gateway" else config.stage(service).drain_s  # type: ignore[arg-type]
    assert config.gateway.drain_s <= min(config.stage(stage).drain_s for stage in STAGES)
    assert int(SERVICES[service]["stop_grace_period"].removesuffix("s")) >= drain_s + 3


def test_a_second_gateway_is_as_the_first_but_for_its_ports() -> None:
    more = dict(GATEWAYS["services"])
    del more["prometheus"]
    first, second = dict(COMPOSE["services"]["gateway"]), dict(more.pop("gateway-2"))
    first["environment"] = first["environment"] | more.pop("gateway")["environment"]
    for own in ("ports", "pull_policy", "build"):
        first.pop(own, None)
        second.pop(own, None)
    assert second == first
    assert GPU["services"]["gateway-2"] == GPU["services"]["gateway"] | {
        "image": second["image"],
        "profiles": ["gateways"],
    }
    for stage, change in more.items():
        environment = COMPOSE["services"][stage]["environment"] | change["environment"]
        values = {key: str(value) for key, value in environment.items() if key.startswith("OMNIRELAY_")}
        reached = [each.control for each in load_config(None, values).gateway.addresses]
        assert reached == ["tcp://gateway:5561", "tcp://gateway-2:5561"]
    assert set(more) == set(STAGES)
