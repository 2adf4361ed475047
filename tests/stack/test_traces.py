"""One trace a request across the four processes."""

import re
from pathlib import Path

import pytest

from omnirelay import Client, SamplingOverrides
from omnirelay.errors import MediaError
from shared.messages import STAGES
from tests.support.media import picture, spoken
from tests.support.otlp import Collector, Span, Trace
from tests.support.processes import wait_until
from tests.support.stack import RunningStack

PAGE = Path(__file__).resolve().parents[2] / "docs/traces.md"
WORD = "Zanzibar"
TEXT = SamplingOverrides(max_tokens=12, min_tokens=12)
CODEC = SamplingOverrides(max_tokens=150, min_tokens=150)


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def stage_spans(trace: Trace) -> dict[str, Span]:
    """The span of each stage that has told one; it must be below the gateway's, and of its process."""
    found: dict[str, Span] = {span.name: span for span in trace.spans if span.name in STAGES}
    for name, span in found.items():
        assert span.service == f"omnirelay-{name}"
        assert span.parent_id == trace.root.span_id
        assert span.attributes["omnirelay.request.id"] == trace.root.attributes["omnirelay.request.id"]
    return found


def check_times(trace: Trace) -> None:
    """Every span begins within the one above it, and ends there if both are of one process.

    A stage's span may end after the gateway's: the gateway has the last message before the stage goes on.
    """
    by_id = {span.span_id: span for span in trace.spans}
    for span in trace.spans:
        assert span.begin <= span.end
        above = by_id.get(span.parent_id)
        if above is not None:
            assert above.begin <= span.begin, (span, above)
            assert above.service != span.service or span.end <= above.end, (span, above)


def documented() -> tuple[set[str], set[str]]:
    """Spans and attributes of the documentation."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Traces\n")[2].partition("\n## ")[0]
    spans = set(re.findall(r"^\| `(\w+)` \| \w+", section, re.MULTILINE))
    attributes = set(re.findall(r"`((?:omnirelay|gen_ai|error)\.[\w.]+)`", section))
    return spans, attributes


def test_a_spoken_answer_to_a_sound_and_a_picture(stack: RunningStack, collector: Collector) -> None:
    with Client(stack.address) as client:
        done = (
            client.chat(
                WORD, audio=spoken(), images=picture(), seed=1, text_sampling=TEXT, codec_sampling=CODEC
            )
            .result()
            .done
        )
    trace = collector.request(done.request_id, *STAGES)
    root = trace.root
    assert (root.service, root.server, root.parent_id, root.error) == ("omnirelay-gateway", True, "", None)
    check_times(trace)
    stages = stage_spans(trace)
    assert names(trace.below(root)) == ["prepare", "queue", *STAGES]
    assert {span.attributes["omnirelay.outcome"] for span in (root, *stages.values())} == {"completed"}
    assert names(trace.below(stages["thinker"])) == ["media", "queue", "prefill", "decode"]
    assert names(trace.below(stages["talker"])) == ["wait_rows", "queue", "prefill", "decode"]
    spoken_in = names(trace.below(stages["token2wav"]))
    assert spoken_in[:2] == ["wait_codes", "chunk"]
    assert set(spoken_in) == {"wait_codes", "chunk"}
    assert spoken_in.count("chunk") == stages["token2wav"].attributes["omnirelay.chunks"] > 2
    for stage in stages.values():
        phases = trace.below(stage)
        # Without a gap: all of the time is accounted for.
        assert [phase.begin for phase in phases] == [stage.begin, *(phase.end for phase in phases[:-1])]
        assert phases[-1].end == stage.end
    assert root.attributes["gen_ai.usage.input_tokens"] == done.prompt_tokens > 100
    assert stages["thinker"].attributes["gen_ai.usage.input_tokens"] == done.prompt_tokens
    assert root.attributes["omnirelay.audio_seconds"] == pytest.approx(done.audio_seconds) == 3.0
    assert root.begin < root.events["first_text"] < root.events["first_audio"] < root.end
    told = repr(trace.spans)
    assert WORD not in told
    assert not [word for word in done.text.split() if word in told]
    logged = f"request {done.request_id} (trace {root.trace_id}) completed"
    wait_until(lambda: any(logged in line for line in stack.output), logged)


def test_all_that_is_told_is_documented_and_nothing_else_is(
    stack: RunningStack, collector: Collector
) -> None:
    with Client(stack.address) as client, pytest.raises(MediaError):
        client.chat("Hello", images=b"no picture").result()
    with Client(stack.address) as client:
        done = client.chat("Hello", audio=spoken(), text_sampling=TEXT, codec_sampling=CODEC).result().done
    collector.request(done.request_id, *STAGES)
    spans = collector.spans(lambda spans: any(span.error for span in spans))
    told = {span.name for span in spans}, {name for span in spans for name in span.attributes}
    assert told == documented()
