"""What the real processes tell Prometheus is what the documentation lists."""

from scripts.reference import METRICS
from shared.messages import STAGES
from tests.support.http import Answer, Readings, get
from tests.support.monitoring import documented, queries, scraped
from tests.support.stack import RunningStack, chat_events

SHORT = ("--max-tokens", "8", "--max-codec-tokens", "30", "--seed", "3")


def ask(stack: RunningStack, stage: str, path: str) -> Answer:
    return get(stack.config["stages"][stage]["http"], path)


def read(stack: RunningStack, stage: str) -> Readings:
    return Readings(ask(stack, stage, "/metrics").metrics.values())


def test_the_reference_has_every_metric_of_a_stage_and_no_other(stack: RunningStack) -> None:
    told: dict[str, tuple[str, str]] = {}
    for stage in STAGES:
        told |= scraped(ask(stack, stage, "/metrics").metrics.values())
    assert told == documented(*METRICS.keys() - {"The gateway"})


def test_the_rules_and_the_dashboard_ask_for_metrics_that_are_there(stack: RunningStack) -> None:
    told = {name for stage in STAGES for name in ask(stack, stage, "/metrics").metrics}
    told |= get(stack.config["gateway"]["http"], "/metrics").metrics.keys()
    # Prometheus adds the first itself; the other is there with TLS only (tests/gateway/test_tls.py).
    told |= {"up", "omnirelay_tls_certificate_expiry_timestamp_seconds"}
    asked = [(query.owner, name) for query in queries() for name in query.names]
    assert [(owner, name) for owner, name in asked if name not in told] == []


def test_vllms_own_metrics_are_told_too_and_named_like_the_stage(stack: RunningStack) -> None:
    chat_events(stack, "Tell me something else.", *SHORT)
    for stage in STAGES:
        metrics = ask(stack, stage, "/metrics").metrics
        told = Readings(metrics.values())
        assert told("vllm:prompt_tokens_total", model_name=stage, engine="0") > 0
        assert told("vllm:e2e_request_latency_seconds_count", model_name=stage, engine="0") > 0
        assert "process_resident_memory_bytes" in metrics
