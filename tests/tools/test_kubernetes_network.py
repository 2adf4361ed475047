"""Who reaches whom in a cluster, who watches and who scales; and all of it is what Kubernetes takes."""

import re
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from scripts.prometheus_rule import RESOURCE, resource
from shared.engine_defaults import CPU_BATCH
from shared.messages import STAGES
from tests.support.children import ROOT
from tests.support.kubernetes import COMPONENT, PROCESSES, VARIANTS, Rendered, Resource
from tests.support.monitoring import documented

pytestmark = pytest.mark.tools

EVERYTHING = "gpu, monitored and scaled"
DNS = {"ports": [{"protocol": each, "port": port} for port in (53, 5353) for each in ("UDP", "TCP")]}
"""Wherever it is: not every cluster has it as ``kube-dns``."""

Edge = tuple[str, str, int]


@pytest.fixture(params=VARIANTS)
def stack(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(request.param)


def policy(stack: Rendered, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = stack.of_kind("NetworkPolicy")[f"omnirelay-{name}"]["spec"]
    return spec


def component(peer: dict[str, Any]) -> str:
    """The process whose pods a peer of a policy is, in this namespace."""
    assert set(peer) == {"podSelector"}
    assert set(peer["podSelector"]) == {"matchLabels"}
    labels = peer["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/name"] == "omnirelay"
    return str(labels[COMPONENT])


def rules(stack: Rendered, process: str, way: str) -> list[tuple[str, int]]:
    """The peers and ports of a policy's rules that name peers of the stack."""
    side = "from" if way == "ingress" else "to"
    named = [rule for rule in policy(stack, process)[way] if side in rule and rule != DNS]
    return [
        (component(peer), each["port"]) for rule in named for peer in rule[side] for each in rule["ports"]
    ]


def architecture(stack: Rendered) -> set[Edge]:
    """Who connects to whom: senders to the inboxes, stages to the gateway (docs/architecture.md)."""
    inbox = {stage: stack.ports(stage)["inbox"] for stage in STAGES}
    senders = zip(("gateway", *STAGES), STAGES, strict=False)
    edges = {(sender, stage, inbox[stage]) for sender, stage in senders}
    gateway = stack.ports("gateway")
    return edges | {(stage, "gateway", gateway[name]) for stage in STAGES for name in ("events", "control")}


def test_neighbours_talk_and_nobody_else(stack: Rendered) -> None:
    allowed_in = {(peer, name, port) for name in PROCESSES for peer, port in rules(stack, name, "ingress")}
    allowed_out = {(name, peer, port) for name in PROCESSES for peer, port in rules(stack, name, "egress")}
    assert allowed_in == allowed_out == architecture(stack)


@pytest.mark.parametrize("process", PROCESSES)
def test_what_is_not_allowed_is_denied(stack: Rendered, process: str) -> None:
    spec = policy(stack, process)
    assert spec["podSelector"] == stack.deployment(process)["spec"]["selector"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert all(rule.get("ports") for way in ("ingress", "egress") for rule in spec[way])
    open_to_all = [rule["ports"] for rule in spec["ingress"] if "from" not in rule]
    clients = [stack.ports("gateway")[name] for name in ("tcp", "http")]
    expected = [[{"protocol": "TCP", "port": port} for port in clients]] if process == "gateway" else []
    assert open_to_all == expected
    # Stages look up the gateway's name; the gateway is told addresses.
    assert [rule for rule in spec["egress"] if rule == DNS] == ([] if process == "gateway" else [DNS])
    assert all("to" in rule or rule == DNS for rule in spec["egress"])


def test_no_other_policy_opens_anything_but_to_prometheus_and_for_the_download() -> None:
    stack = Rendered(EVERYTHING)
    others = set(stack.of_kind("NetworkPolicy")) - {f"omnirelay-{process}" for process in PROCESSES}
    assert others == {"omnirelay-model", "omnirelay-monitoring"}
    spec = policy(stack, "model")
    (job,) = stack.of_kind("Job").values()
    assert spec["podSelector"]["matchLabels"] == job["spec"]["template"]["metadata"]["labels"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in spec
    assert spec["egress"] == [{"ports": [{"protocol": "TCP", "port": 443}]}, DNS]
    spec = policy(stack, "monitoring")
    (selected,) = spec["podSelector"]["matchExpressions"]
    assert set(selected["values"]) == set(PROCESSES)
    assert spec["policyTypes"] == ["Ingress"]
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": "monitor"}]
    assert rule["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]


def test_the_alert_rules_are_those_of_prometheus() -> None:
    assert RESOURCE.read_text(encoding="utf-8") == resource(), "run scripts/prometheus_rule.py"
    (rule,) = Rendered(EVERYTHING).of_kind("PrometheusRule").values()
    written = (ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8")
    assert rule["spec"] == yaml.safe_load(written)


def test_prometheus_scrapes_every_process_once_as_the_job_of_the_rules() -> None:
    stack = Rendered(EVERYTHING)
    (monitor,) = stack.of_kind("ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    scraped = [
        service["spec"]["selector"][COMPONENT]
        for service in stack.of_kind("Service").values()
        if monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        and endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    ]
    assert sorted(scraped) == sorted(PROCESSES)
    label = monitor["spec"]["jobLabel"]
    assert {each["metadata"]["labels"][label] for each in stack.of_kind("Service").values()} == {"omnirelay"}
    # Prometheus has to know of a process that is not ready, too.
    assert all(
        each["spec"]["publishNotReadyAddresses"]
        for name, each in stack.of_kind("Service").items()
        if name != "omnirelay"
    )


def test_each_stage_scales_by_its_own_requests_before_its_batch_is_full() -> None:
    stack = Rendered(EVERYTHING)
    scaled = stack.of_kind("ScaledObject")
    assert set(scaled) == {f"omnirelay-{stage}" for stage in STAGES}
    config = stack.config("gateway")
    for stage in STAGES:
        spec = scaled[f"omnirelay-{stage}"]["spec"]
        assert spec["scaleTargetRef"] == {"name": f"omnirelay-{stage}"}
        assert f"omnirelay-{stage}" in stack.of_kind("Deployment")
        (trigger,) = spec["triggers"]
        query = trigger["metadata"]["query"]
        assert set(re.findall(r"omnirelay_\w+", query)) <= documented().keys()
        assert f'{{stage="{stage}", namespace="omnirelay"}}' in query
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert 0 < int(trigger["metadata"]["threshold"]) < CPU_BATCH
    # With fewer than the stages compute at once, none would ever have a reason to be scaled far.
    assert config.gateway.limits.max_active is None


VERSIONS = ("1.36", "1.37")
CUSTOM: dict[str, Any] = yaml.safe_load(
    (ROOT / "tests/support/custom_resources.yaml").read_text(encoding="utf-8")
)


@cache
def custom(kind: str) -> Any:
    """The validator of a custom resource."""
    return jsonschema.Draft202012Validator({"$ref": f"#/definitions/{kind.replace('/', '~1')}", **CUSTOM})


def check(resource: Resource, version: str) -> None:
    """ValidationError if the resource is not as its schema says."""
    kind = f"{resource['apiVersion']} {resource['kind']}"
    if kind in CUSTOM["definitions"]:
        custom(kind).validate(resource)
    else:
        assert kubernetes_validate.validate(resource, version, strict=True) == version


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_resource_is_as_its_schema_says(variant: str, version: str) -> None:
    for each in Rendered(variant).all:
        check(each, version)
