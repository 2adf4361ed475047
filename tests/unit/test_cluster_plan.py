"""What processes get on a Ray cluster: resources, addresses, settings.  Nothing here needs Ray."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnirelay.cli.main import build_parser, main
from omnirelay.errors import ConfigError
from ops.cluster import keys, plan
from ops.cluster.members import read_underruns
from ops.commands import replicas
from shared.config import Config, GatewayAddresses, load_config
from shared.messages import ROLES
from shared.transport.keys import load_keys
from tests.support.children import Child
from tests.support.processes import wait_until


def config(**values: Any) -> Config:
    return Config.model_validate({"model": "Qwen/Qwen2.5-Omni-7B"} | values)


def test_a_replica_reserves_its_threads_and_the_gpus_of_its_model():
    parallel = config(
        stages={"thinker": {"threads": 3, "engine": {"tensor_parallel_size": 4}}},
        cluster={"talker": {"cpus": 0.5, "memory_bytes": 100, "resources": {"fast": 1.0}}},
    )
    assert plan.resources_of(parallel, "thinker", gpus_there=True) == {"num_cpus": 3, "num_gpus": 4}
    assert plan.resources_of(parallel, "thinker", gpus_there=False) == {"num_cpus": 3, "num_gpus": 0}
    assert plan.resources_of(parallel, "token2wav", gpus_there=True) == {"num_cpus": 1, "num_gpus": 1}
    assert plan.resources_of(parallel, "gateway", gpus_there=True) == {"num_cpus": 1, "num_gpus": 0}
    assert plan.resources_of(parallel, "talker", gpus_there=True) == {
        "num_cpus": 0.5,
        "num_gpus": 1,
        "memory": 100,
        "resources": {"fast": 1.0},
    }


def test_a_stage_may_do_without_the_gpus_that_are_there():
    assert plan.resources_of(config(cluster={"talker": {"gpus": 0}}), "talker", True)["num_gpus"] == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": None}, "model is not set"),
        (
            {"gateway": {"others": [{"events": "tcp://127.0.0.1:1", "control": "tcp://127.0.0.1:2"}]}},
            "others",
        ),
        ({"share_gpus": True}, "share_gpus is for stages of one machine"),
        ({"gateway": {"api_keys": "keys.yaml"}}, "gateway.api_keys keys.yaml is relative"),
        ({"gateway": {"turn_model": "v3.onnx"}}, "gateway.turn_model v3.onnx is relative"),
        (
            {"gateway": {"events": "ipc:///run/events"}},
            "gateway.events ipc:///run/events is for processes of",
        ),
        ({"stages": {"talker": {"devices": "0"}}}, "stages.talker.devices is set"),
        ({"stages": {"talker": {"advertise": "tcp://127.0.0.1:1"}}}, "stages.talker.advertise is set"),
        (
            {"stages": {"talker": {"replicas": 3}}, "cluster": {"talker": {"max_replicas": 2}}},
            "replicas must be",
        ),
        ({"cluster": {"thinker": {"min_replicas": 2}}}, "stages.thinker.replicas must be within"),
        ({"cluster": {"thinker": {"gpus": 2}}}, "cluster.thinker.gpus must be 0 or 1"),
    ],
)
def test_what_does_not_fit_a_cluster_is_refused(values: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as caught:
        plan.check(config(**values))
    assert words in str(caught.value)


def test_a_relative_directory_is_no_model_for_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="model mine is relative"):
        plan.check(config(model="mine"))
    plan.check(config(model=str(tmp_path / "mine")))
    plan.check(config(gateway={"turn_model": "auto"}))


def test_fewer_at_most_than_at_least_is_refused():
    with pytest.raises(ValueError, match="max_replicas must not be below min_replicas"):
        config(cluster={"talker": {"min_replicas": 3, "max_replicas": 2}})


def test_processes_on_other_nodes_read_the_same_settings(tmp_path: Path):
    path = tmp_path / "settings.yaml"
    written = config(
        gateway={"limits": {"max_active": 3}, "http": None, "drain_s": 2.5, "http_hosts": ["a.example"]},
        stages={"talker": {"engine": {"max_num_seqs": 2}}},
        cluster={"talker": {"max_replicas": 4}},
    )
    path.write_text(plan.settings_text(written), encoding="utf-8")
    assert load_config(path, {}) == written


def test_processes_listen_on_their_node():
    stack = config(gateway={"events": "tcp://127.0.0.1:7000"})
    assert plan.gateway_addresses(stack, 1, "10.0.0.7") == GatewayAddresses(
        events="tcp://10.0.0.7:7000", control="tcp://10.0.0.7:5561"
    )
    assert plan.gateway_variables(stack, 2, "10.0.0.7") == {
        "OMNIRELAY_GATEWAY__LISTEN": "tcp://127.0.0.1:5655",
        "OMNIRELAY_GATEWAY__EVENTS": "tcp://10.0.0.7:7100",
        "OMNIRELAY_GATEWAY__CONTROL": "tcp://10.0.0.7:5661",
        "OMNIRELAY_GATEWAY__HTTP": "tcp://127.0.0.1:8100",
        "OMNIRELAY_GATEWAY__MONITOR": "tcp://127.0.0.1:5671",
        "OMNIRELAY_GATEWAY__REPLICAS": "1",
    }
    silent = config(gateway={"http": None})
    assert plan.gateway_variables(silent, 1, "10.0.0.7")["OMNIRELAY_GATEWAY__HTTP"] == "null"
    assert plan.stage_addresses(stack, "talker", "10.0.0.7", 4321) == {
        "OMNIRELAY_STAGES__TALKER__INBOX": "tcp://10.0.0.7:*",
        "OMNIRELAY_STAGES__TALKER__HTTP": "tcp://127.0.0.1:4321",
    }
    assert plan.stage_addresses(stack, "talker", "fd00::7", 1)["OMNIRELAY_STAGES__TALKER__INBOX"] == (
        "tcp://[fd00::7]:*"
    )
    opened = config(
        stages={"talker": {"http": "tcp://0.0.0.0:5573"}, "thinker": {"http": None}},
        security={"internal_network": True},
    )
    assert plan.stage_addresses(opened, "talker", "10.0.0.7", 4321)["OMNIRELAY_STAGES__TALKER__HTTP"] == (
        "tcp://10.0.0.7:4321"
    )
    thinker = plan.stage_addresses(opened, "thinker", "10.0.0.7", 1)
    assert thinker["OMNIRELAY_STAGES__THINKER__HTTP"] == "null"


def test_clients_are_told_the_nodes_address():
    opened = config(gateway={"listen": "tcp://0.0.0.0:5555"})
    assert plan.client_addresses(opened, 1, "10.0.0.7") == ("tcp://10.0.0.7:5555", "http://127.0.0.1:8000")
    assert plan.client_addresses(opened, 3, "10.0.0.8") == ("tcp://10.0.0.8:5755", "http://127.0.0.1:8200")


def test_a_stage_reads_where_the_gateways_are(tmp_path: Path):
    stack = config(gateway={"replicas": 3, "limits": {"max_active": 3}}, security={"internal_network": True})
    path = tmp_path / "settings.yaml"
    places = [plan.gateway_addresses(stack, number, f"10.0.0.{number}") for number in (1, 3)]
    path.write_text(plan.stage_settings(plan.settings_text(stack), places), encoding="utf-8")
    read = load_config(path, {})
    assert read.gateway.addresses == places
    assert read.gateway.limits == stack.gateway.limits
    # Whatever a file says, there is room for all.
    plan.stage_settings("", [plan.gateway_addresses(stack, number, "10.0.0.1") for number in range(1, 17)])


def test_gateways_without_ports_are_refused():
    stack = config(gateway={"listen": "tcp://127.0.0.1:65400"})
    assert plan.with_gateways(stack, 2).gateway.replicas == 2
    with pytest.raises(ConfigError, match=r"there cannot be 3 gateways: .*listen of gateway 3"):
        plan.with_gateways(stack, 3)


@pytest.mark.parametrize(
    ("name", "kind"), [("talker-12", "talker"), ("gateway-1", "gateway"), ("talker", None), ("x-1", None)]
)
def test_actors_of_others_are_left_alone(name: str, kind: str | None):
    assert plan.kind_of(name) == kind


def test_each_process_gets_its_own_secret_alone(tmp_path: Path):
    made = keys.gather(config())
    for kind in ROLES:
        own = keys.keys_for(kind, made)
        assert [name for name in own if name.endswith("_secret")] == [f"{kind}.key_secret"]
        directory = tmp_path / kind
        directory.mkdir()
        keys.write(own, directory)
        assert load_keys(directory, kind).role == kind


def test_configured_keys_are_used_and_none_where_none_are_needed(tmp_path: Path):
    keys.write(keys.gather(config()), tmp_path)
    ours = keys.gather(config(security={"keys": str(tmp_path)}))
    assert ours["talker.key"] == (tmp_path / "talker.key").read_text(encoding="ascii")
    assert keys.gather(config(security={"internal_network": True})) == {}
    with pytest.raises(ConfigError, match="cannot read the key"):
        keys.gather(config(security={"keys": str(tmp_path / "absent")}))


@pytest.mark.parametrize(
    "text", ["talker", "talker=", "talker=0", "talker=257", "talker=-1", "gateway=17", "gateway=0", "x=1"]
)
def test_a_number_that_no_stage_can_have_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="is not STAGE=N"):
        replicas(text)


def test_stages_and_their_numbers_are_read():
    arguments = build_parser().parse_args(["cluster", "scale", "talker=3", "token2wav=256", "gateway=16"])
    assert arguments.numbers == [("talker", 3), ("token2wav", 256), ("gateway", 16)]


def test_without_ray_the_command_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "ray", None)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": "Qwen/Qwen2.5-Omni-7B"}), encoding="utf-8")
    for command in (["up", "--config", str(path)], ["status"], ["scale", "talker=1"], ["down"]):
        assert main(["cluster", *command]) == 1
        assert "pip install 'omnirelay-server[cluster]'" in capsys.readouterr().err


def test_gaps_in_playback_are_read_from_a_gateways_metrics():
    text = "# TYPE omnirelay_playback_underruns_total counter\nomnirelay_playback_underruns_total 7.0\n"
    assert read_underruns(text) == 7
    assert read_underruns("# TYPE other gauge\nother 1\n") == 0


def test_keys_are_removed_when_their_actor_is_killed(tmp_path: Path):
    code = (
        "import pathlib, sys, time; from ops.cluster import keys; folder = pathlib.Path(sys.argv[1]);"
        "folder.mkdir(); keys.write({'thinker.key_secret': 'x'}, folder); kept = keys.remove_at_end(folder);"
        "print('written', flush=True); time.sleep(60)"
    )
    folder = tmp_path / "a folder"
    with Child([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as actor:
        actor.stdout.readline()
        assert (folder / "thinker.key_secret").exists()
        actor.kill()
    wait_until(lambda: not folder.exists(), "the folder is removed", 60)
