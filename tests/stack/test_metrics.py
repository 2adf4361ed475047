"""What the real processes tell Prometheus is what the documentation lists."""

import pytest

from omnirelay import Client, SamplingOverrides
from scripts.reference import METRICS
from shared.messages import STAGES
from tests.support.http import Answer, Readings, get
from tests.support.monitoring import documented, queries, scraped
from tests.support.stack import RunningStack


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


def test_a_request_moves_the_metrics_of_all_stages(stack: RunningStack) -> None:
    before: dict[str, Readings] = {stage: read(stack, stage) for stage in STAGES}
    text, codec = SamplingOverrides(max_tokens=8), SamplingOverrides(max_tokens=30)
    with Client(stack.address) as client:
        done = client.chat("Hello", seed=3, text_sampling=text, codec_sampling=codec).result().done
    after: dict[str, Readings] = {stage: read(stack, stage) for stage in STAGES}

    def change(stage: str, name: str, **labels: str) -> float:
        return after[stage](name, stage=stage, **labels) - before[stage](name, stage=stage, **labels)

    prompt, reply = done.prompt_tokens, len(done.text_token_ids)
    # The voice's row, and two that close the track; the last token has none.
    assert change("thinker", "omnirelay_conditioning_rows_sent_total") == prompt + 1 + reply - 1 + 2
    assert change("thinker", "omnirelay_prefix_cache_queried_tokens_total") == prompt
    assert change("thinker", "omnirelay_edge_sent_messages_total", edge="gateway") == reply
    sent = change("thinker", "omnirelay_edge_sent_bytes_total", edge="talker")
    assert sent == change("talker", "omnirelay_edge_received_bytes_total", edge="talker") > 0
    codes = change("talker", "omnirelay_edge_sent_messages_total", edge="token2wav")
    assert codes == change("token2wav", "omnirelay_edge_received_messages_total", edge="token2wav") > 0
    assert change("token2wav", "omnirelay_synthesis_audio_seconds_total") == pytest.approx(done.audio_seconds)
    for stage in STAGES:
        assert change(stage, "omnirelay_stage_step_seconds_count") > 0
        assert change(stage, "omnirelay_stage_batch_requests_count") > 0
        spent = {
            activity: change(stage, "omnirelay_stage_seconds_total", activity=activity)
            for activity in ("wait", "take", "model", "engine", "send")
        }
        assert min(spent.values()) > 0, spent
        # vLLM's own are told too, and named like the stage.
        for name in ("vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count"):
            assert after[stage](name, model_name=stage, engine="0") > 0
        assert after[stage].has("process_resident_memory_bytes")
        assert ask(stack, stage, "/livez").status == ask(stack, stage, "/readyz").status == 200
