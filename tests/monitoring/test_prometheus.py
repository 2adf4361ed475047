"""The real Prometheus reads the running stack, takes the rules, and has an answer to every panel.

Run by ``make test-monitoring``: Debian's package ``prometheus`` must be installed.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq

from shared.messages import STAGES
from shared.transport.wire import VERSION_BYTE
from tests.shared.support import wait_until
from tests.support.http import get
from tests.support.monitoring import RULES, Prometheus, Query, alerts, panel_queries
from tests.support.stack import RunningStack
from tests.support.traffic import Traffic

pytestmark = pytest.mark.monitoring

WINDOW = "15s"
"""What stands for Grafana's ``$__rate_interval``: several scrapes."""
PANELS = list(panel_queries())
OF_LOAD = "OmniRelay(HeartbeatsLate|FirstAudioSlow|SlowerThanSpeech|PlaybackGaps|RequestsStandInLine)"
"""Alerts that are right, after some minutes, on a machine with too much other work."""
SCALING = Path(__file__).parents[2] / "deploy/kubernetes/components/keda/scaling.yaml"
SCALED: list[dict[str, Any]] = list(yaml.safe_load_all(SCALING.read_text(encoding="utf-8")))


def run(*command: str, told: str = "") -> None:
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules(promtool: str) -> None:
    run(promtool, "check", "rules", str(RULES))


def test_every_alert_fires_when_it_should(promtool: str) -> None:
    tests = Path(__file__).with_name("rules_test.yml")
    told = tests.read_text(encoding="utf-8")
    assert [rule["alert"] for rule in alerts() if rule["alert"] not in told] == []
    run(promtool, "test", "rules", str(tests))


def test_promtool_accepts_the_configuration_with_the_rules(promtool: str, prometheus: Prometheus) -> None:
    run(promtool, "check", "config", str(prometheus.config))


@pytest.mark.parametrize("stage", STAGES)
def test_promtool_finds_no_fault_with_our_names_and_words(
    promtool: str, stack: RunningStack, stage: str
) -> None:
    lines = get(stack.config["stages"][stage]["http"], "/metrics").body.decode().splitlines(keepends=True)
    ours = [line for line in lines if re.match("(# (HELP|TYPE) )?omnirelay_", line)]
    assert ours
    run(promtool, "check", "metrics", told="".join(ours))


def test_every_process_is_read_without_an_error(prometheus: Prometheus) -> None:
    wait_until(lambda: {(each["health"], each["lastError"]) for each in prometheus.targets()} == {("up", "")})
    # A target that is up may not have been recorded so far.
    wait_until(lambda: prometheus.values('sum(up{job="omnirelay"})') == [4])


@pytest.mark.parametrize("scaled", SCALED, ids=lambda scaled: str(scaled["metadata"]["name"]))
def test_what_a_stage_is_scaled_by_is_one_number(prometheus: Prometheus, scaled: dict[str, Any]) -> None:
    (trigger,) = scaled["spec"]["triggers"]
    wait_until(lambda: len(prometheus.values(trigger["metadata"]["query"])) == 1)


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    wait_until(lambda: {rule["health"] for rule in prometheus.rules()} == {"ok"})
    assert len(prometheus.rules()) == len(alerts())


@pytest.mark.parametrize("query", PANELS, ids=lambda query: f"{query.owner}: {query.text}"[:90])
def test_a_panel_has_data(prometheus: Prometheus, traffic: Traffic, query: Query) -> None:
    text = query.text.replace("$__rate_interval", WINDOW)
    wait_until(lambda: prometheus.values(text) != [])


@pytest.mark.parametrize(
    "metric",
    [
        "omnirelay_synthesis_audio_seconds_total",
        'omnirelay_media_items_total{kind="image", outcome="decoded"}',
        'omnirelay_media_items_total{kind="audio", outcome="cached"}',
        'omnirelay_edge_sent_bytes_total{stage="thinker", edge="talker"}',
        'vllm:generation_tokens_total{model_name="talker"}',
    ],
)
def test_traffic_is_seen_where_it_should_be(prometheus: Prometheus, traffic: Traffic, metric: str) -> None:
    wait_until(lambda: prometheus.values(f"rate({metric}[{WINDOW}]) > 0") != [])


def test_a_message_that_no_stage_believes_raises_its_alert_and_no_other(
    prometheus: Prometheus, stack: RunningStack, traffic: Traffic
) -> None:
    firing = f'ALERTS{{alertstate="firing", alertname!~"{OF_LOAD}"}}'
    assert prometheus.query(firing) == []
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(stack.config["stages"]["talker"]["inbox"])
        push.send_multipart([VERSION_BYTE + b" no message"])
        wait_until(lambda: prometheus.query(firing) != [])
    (alert,) = (series["metric"] for series in prometheus.query(firing))
    assert (alert["alertname"], alert["edge"]) == ("OmniRelayMessagesRefused", "talker")
