"""The manifests of ``deploy/kubernetes`` say what the configuration, the processes and Compose say.

Whether Kubernetes takes them, and who reaches whom, is in ``test_kubernetes_network.py``.
"""

import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from shared.config import DEFAULT_CHECKPOINT, Config, load_config
from shared.ending import END_S
from shared.messages import ROLES, STAGES
from shared.transport.keys import public_file, secret_file
from tests.support.children import ROOT
from tests.support.kubernetes import COMPONENT, PROCESSES, VARIANTS, Rendered, kustomize, memory

pytestmark = pytest.mark.tools

COMPOSE, GPU = (
    yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["services"]
    for name in ("compose.yaml", "compose.gpu.yaml")
)
MODEL = PurePosixPath("/var/lib/omnirelay/.cache/omnirelay")
OTHERWISE = {
    # Addresses: a pod has its own.
    r"OMNIRELAY_(GATEWAY__(EVENTS|CONTROL)|STAGES__\w+__INBOX)",
    # Compose's network is its own, and its ports are published on one machine only.
    "OMNIRELAY_SECURITY__INTERNAL_NETWORK",
    "OMNIRELAY_GATEWAY__HTTP_HOSTS",
    # A pod sees its own GPU alone.
    r"OMNIRELAY_SHARE_GPUS|OMNIRELAY_STAGES__\w+__DEVICES|NVIDIA_DRIVER_CAPABILITIES",
    # One volume, at one place.
    "HF_HUB_CACHE|OMNI_MODEL",
    # From the environment of who calls Compose.
    "OTEL_.*|HF_TOKEN",
}
"""What Compose sets, and Kubernetes on purpose not, or to something else; docs/kubernetes.md says why."""


@pytest.fixture(params=VARIANTS)
def stack(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(request.param)


def port(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


def bound(process: str, config: Config) -> dict[str, str | None]:
    """The addresses that a process binds, by the name of its port."""
    if process == "gateway":
        own = config.gateway
        return {"tcp": own.listen} | {
            name: getattr(own, name) for name in ("http", "events", "control", "monitor")
        }
    stage = config.stage(process)  # type: ignore[arg-type]
    return {"inbox": stage.inbox, "monitor": stage.http}


def on_gpus(stack: Rendered) -> bool:
    return stack.variant.startswith("gpu")


def compose(service: str, stack: Rendered) -> dict[str, Any]:
    """A service of Compose: its files merged as far as is compared here."""
    base, more = COMPOSE[service], GPU[service] if on_gpus(stack) else {}
    return {**base, **more, "environment": base.get("environment", {}) | more.get("environment", {})}


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_reads_its_configuration_and_listens_on_the_ports_of_its_container(
    stack: Rendered, process: str
) -> None:
    config = stack.config(process)
    addresses = bound(process, config)
    assert set(addresses.values()) == {f"tcp://0.0.0.0:{number}" for number in stack.ports(process).values()}
    assert {name: port(address) for name, address in addresses.items()} == stack.ports(process)
    # The ports are those of the defaults.
    assert stack.ports(process) == {name: port(address) for name, address in bound(process, Config()).items()}
    assert not config.security.internal_network


@pytest.mark.parametrize("process", STAGES)
def test_a_stage_finds_all_gateways_and_says_where_it_is_reached(stack: Rendered, process: str) -> None:
    config = stack.config(process)
    service = stack.of_kind("Service")["omnirelay-gateways"]["spec"]
    named = {each["name"]: f"tcp://omnirelay-gateways:{each['port']}" for each in service["ports"]}
    assert (config.gateway.events, config.gateway.control) == (named["events"], named["control"])
    # The name stands for each pod's address, on which the port is that of the container.
    assert service["clusterIP"] == "None"
    # A gateway is ready when the stages have reached it.
    assert service["publishNotReadyAddresses"] is True
    advertised = config.stage(process).advertise  # type: ignore[arg-type]
    assert advertised == f"tcp://10.244.0.7:{stack.ports(process)['inbox']}"
    (source,) = [each for each in stack.container(process)["env"] if each["name"] == "POD_IP"]
    assert source["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_services_lead_to_ports_of_the_pods_that_they_select(stack: Rendered) -> None:
    services = stack.of_kind("Service")
    assert set(services) == {"omnirelay", "omnirelay-gateways", *(f"omnirelay-{each}" for each in STAGES)}
    for name, service in services.items():
        process = service["spec"]["selector"][COMPONENT]
        labels = stack.deployment(process)["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == labels == service["metadata"]["labels"]
        assert stack.deployment(process)["spec"]["selector"] == {"matchLabels": labels}
        for each in service["spec"]["ports"]:
            assert stack.ports(process)[each["targetPort"]] == each["port"]
        names = {each["name"] for each in service["spec"]["ports"]}
        assert names == (
            {"tcp", "http"} if name == "omnirelay" else set(stack.ports(process)) - {"tcp", "http"}
        )
        assert (service["spec"].get("clusterIP") == "None") is (name != "omnirelay")


@pytest.mark.parametrize("process", PROCESSES)
def test_probes_ask_what_a_process_answers(stack: Rendered, process: str) -> None:
    container = stack.container(process)
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    # A gateway has started before its stages have; a stage when its model is loaded.
    start = "/livez" if process == "gateway" else "/readyz"
    assert asked == {
        "startup": {"path": start, "port": "monitor"},
        "readiness": {"path": "/readyz", "port": "monitor"},
        "liveness": {"path": "/livez", "port": "monitor"},
    }
    startup = container["startupProbe"]
    allowed_s = startup["failureThreshold"] * startup["periodSeconds"]
    if process != "gateway":
        minutes = compose(process, stack)["healthcheck"]["start_period"].removesuffix("m")
        assert allowed_s == 60 * int(minutes)


@pytest.mark.parametrize("process", PROCESSES)
def test_who_is_told_to_stop_has_time_for_it(stack: Rendered, process: str) -> None:
    config = stack.config(process)
    wait_s = stack.container(process)["lifecycle"]["preStop"]["sleep"]["seconds"]
    # All are stopped at once: the stages stay for the gateway, which begins to drain when they do.
    assert wait_s == stack.container("gateway")["lifecycle"]["preStop"]["sleep"]["seconds"] > 0
    own = config.gateway.drain_s if process == "gateway" else config.stage(process).drain_s  # type: ignore[arg-type]
    assert config.gateway.drain_s <= own
    assert stack.pod(process)["terminationGracePeriodSeconds"] >= wait_s + own + END_S


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_is_that_of_compose(stack: Rendered, process: str) -> None:
    container, service = stack.container(process), compose(process, stack)
    assert (container["command"], container["image"]) == (service["command"], service["image"])
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert memory(limits["memory"]) == memory(service["deploy"]["resources"]["limits"]["memory"])
    assert set(requests) == {"cpu", "memory"}
    assert memory(requests["memory"]) <= memory(limits["memory"])
    gpus = 1 if on_gpus(stack) and process in STAGES else None
    assert limits.get("nvidia.com/gpu") == gpus


@pytest.mark.parametrize("process", PROCESSES)
def test_settings_are_those_of_compose_but_for_what_differs_on_purpose(stack: Rendered, process: str) -> None:
    ours = stack.environment(process)
    same = {
        name: str(value)
        for name, value in compose(process, stack)["environment"].items()
        if not any(re.fullmatch(pattern, name) for pattern in OTHERWISE)
    }
    assert same
    assert {name: ours.get(name) for name in same} == same


def test_every_pod_is_restricted(stack: Rendered) -> None:
    """As the Pod Security Standard "restricted" demands, and more."""
    pods = [pod for _, pod in stack.pods()]
    assert len(pods) == (5 if on_gpus(stack) else 4)
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "secret", "persistentVolumeClaim"}
        assert all("sizeLimit" in each["emptyDir"] for each in pod["volumes"] if "emptyDir" in each)
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
            assert not any("hostPort" in each for each in container.get("ports", []))


@pytest.mark.parametrize("process", PROCESSES)
def test_what_a_process_may_write_is_little(stack: Rendered, process: str) -> None:
    volumes = {each["name"]: each for each in stack.pod(process)["volumes"]}
    mounts = stack.container(process)["volumeMounts"]
    assert {each["name"] for each in mounts} == set(volumes)
    written = {each["mountPath"]: volumes[each["name"]] for each in mounts if not each.get("readOnly")}
    expected = {"/tmp"}  # noqa: S108
    if process in STAGES:
        expected.add("/dev/shm")  # noqa: S108
        if on_gpus(stack):
            expected.add(stack.environment(process)["HOME"])
    assert set(written) == expected
    for path in ("/tmp", "/dev/shm"):  # noqa: S108
        if path in written:
            assert written[path]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("process", PROCESSES)
def test_each_process_gets_its_own_secret_and_nobody_elses(stack: Rendered, process: str) -> None:
    config, pod = stack.config(process), stack.pod(process)
    places = {each["name"]: each["mountPath"] for each in stack.container(process)["volumeMounts"]}
    volumes = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
    assert config.security.keys == places["curve"]
    folder = Path(places["curve"])
    own = next(role for role in ROLES if role == process)
    files = [public_file(folder, role) for role in ROLES] + [secret_file(folder, own)]
    items = volumes["curve"]["items"]
    assert sorted(each["path"] for each in items) == sorted(path.name for path in files)
    assert all(each["key"] == each["path"] for each in items)
    # Root owns it, and the processes' group reads it.
    assert all(volume["defaultMode"] == 0o440 for volume in volumes.values())
    assert set(volumes) == {"curve", "api-keys"} if process == "gateway" else {"curve"}
    if process == "gateway":
        assert config.gateway.api_keys == f"{places['api-keys']}/keys.yaml"


def test_the_checkpoint_is_written_where_the_processes_read_it(stack: Rendered) -> None:
    if on_gpus(stack):
        (job,) = stack.of_kind("Job").values()
        (writer,) = job["spec"]["template"]["spec"]["containers"]
        writers = [writer]
    else:
        writers = [each for process in PROCESSES for each in stack.pod(process)["initContainers"]]
        assert len(writers) == len(PROCESSES)
    place = {"name": "model", "mountPath": str(MODEL)}
    for each in writers:
        assert each["command"] == COMPOSE["checkpoint"]["command"]
        assert each["image"] == compose("checkpoint", stack)["image"]
        assert place in each["volumeMounts"]
    for process in PROCESSES:
        assert place | {"readOnly": True} in stack.container(process)["volumeMounts"]
        environment = stack.environment(process)
        if on_gpus(stack):
            assert PurePosixPath(environment["HF_HUB_CACHE"]).is_relative_to(MODEL)
            assert environment["HF_HUB_OFFLINE"] == "1"
        else:
            assert stack.config(process).model is None
            dockerfile = (ROOT / "deploy/Dockerfile").read_text("utf-8")
            folder = re.findall(r"^WORKDIR (\S+)$", dockerfile, re.MULTILINE)
            assert PurePosixPath(folder[-1], DEFAULT_CHECKPOINT).is_relative_to(MODEL)


def test_gateways_are_replaced_one_after_the_other_and_nobody_scales_stages_back(stack: Rendered) -> None:
    gateway = stack.deployment("gateway")["spec"]
    assert gateway["replicas"] == 2
    assert gateway["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    (spread,) = stack.pod("gateway")["topologySpreadConstraints"]
    assert spread["labelSelector"] == gateway["selector"]
    assert not any("replicas" in stack.deployment(stage)["spec"] for stage in STAGES)


def test_the_maintenance_of_nodes_is_not_blocked(stack: Rendered) -> None:
    budgets = stack.of_kind("PodDisruptionBudget")
    assert set(budgets) == {f"omnirelay-{process}" for process in PROCESSES}
    for process in PROCESSES:
        spec = budgets[f"omnirelay-{process}"]["spec"]
        assert spec["selector"] == stack.deployment(process)["spec"]["selector"]
        assert spec["maxUnavailable"] == 1


def test_the_page_works_under_the_host_of_the_ingress(stack: Rendered) -> None:
    (ingress,) = stack.of_kind("Ingress").values()
    (rule,) = ingress["spec"]["rules"]
    assert ingress["spec"]["tls"] == [{"hosts": [rule["host"]], "secretName": "omnirelay-tls"}]
    assert stack.config("gateway").gateway.http_origins == [f"https://{rule['host']}"]
    (path,) = rule["http"]["paths"]
    service = stack.of_kind("Service")[path["backend"]["service"]["name"]]
    assert path["backend"]["service"]["port"]["name"] in {each["name"] for each in service["spec"]["ports"]}


def test_the_overlay_on_the_page_changes_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    (overlay,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(overlay, encoding="utf-8")
    (tmp_path / "omnirelay").symlink_to(ROOT)
    done = subprocess.run([kustomize(), "build", tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    resources = list(yaml.safe_load_all(done.stdout))
    assert {each["metadata"]["namespace"] for each in resources} == {"omnirelay"}
    by_kind = {each["kind"]: each for each in resources}
    config = load_config(environment=by_kind["ConfigMap"]["data"])
    assert config.gateway.http_origins == ["https://chat.example.com"]
    assert [str(each) for each in config.gateway.trusted_proxies] == ["10.244.0.0/16"]
    assert by_kind["Ingress"]["spec"]["rules"][0]["host"] == "chat.example.com"
    assert by_kind["Ingress"]["spec"]["tls"][0]["hosts"] == ["chat.example.com"]
    images = set(re.findall(r"image: (\S+)", done.stdout))
    registry = "registry.example.com"
    assert images == {f"{registry}/{GPU['thinker']['image']}", f"{registry}/{COMPOSE['gateway']['image']}"}
    # The pods read the ConfigMap that was merged.
    read = set(re.findall(r"configMapRef:\s+name: (\S+)", done.stdout))
    assert read == {by_kind["ConfigMap"]["metadata"]["name"]}
