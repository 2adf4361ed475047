"""One trace a request across the four processes."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.measure.otlp import Collector, Span, Trace
from omnirelay import Client, SamplingOverrides
from omnirelay.errors import CancelledRequestError, MediaError
from shared.messages import STAGES
from tests.support.media import picture, spoken
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
    assert any(
        f"request {done.request_id} (trace {root.trace_id}) completed" in line for line in stack.output
    )


def test_a_client_that_traces_finds_all_of_it_below_its_own_span(
    stack: RunningStack, collector: Collector
) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")
    body = {"model": "omnirelay", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]}
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).raise_for_status()
    trace = collector.trace(trace_id, "request", "thinker")
    assert trace.root.parent_id == span_id
    assert names(trace.below(trace.root)) == ["prepare", "queue", "thinker"]
    assert names(trace.below(trace["thinker"])) == ["queue", "prefill", "decode"]
    check_times(trace)


def test_requests_at_once_are_not_mixed(stack: RunningStack, collector: Collector) -> None:
    with Client(stack.address) as client, ThreadPoolExecutor(6) as pool:

        def ask(number: int) -> Any:
            short = SamplingOverrides(max_tokens=4 + number)
            return client.chat(f"Hello {number}", text_sampling=short, codec_sampling=short).result().done

        answers = list(pool.map(ask, range(6)))
    traces = [collector.request(done.request_id, *STAGES) for done in answers]
    assert len({trace.root.trace_id for trace in traces}) == 6
    for trace in traces:
        assert names(trace.below(trace.root)) == ["prepare", "queue", *STAGES]
        assert set(stage_spans(trace)) == set(STAGES)
        check_times(trace)


def test_a_file_that_is_none_is_an_error_of_the_thinker(stack: RunningStack, collector: Collector) -> None:
    with Client(stack.address) as client:
        answer = client.chat(WORD, images=b"no picture")
        with pytest.raises(MediaError):
            answer.result()
        request_id = answer.request_id
    assert request_id is not None
    trace = collector.request(request_id, "thinker")
    assert (trace.root.error, trace.root.attributes["omnirelay.outcome"]) == ("media_invalid", "refused")
    thinker = stage_spans(trace)["thinker"]
    assert (thinker.error, thinker.attributes["omnirelay.outcome"]) == ("media_invalid", "failed")
    assert names(trace.below(thinker)) == ["media"]
    assert WORD not in repr(trace.spans)


def test_a_request_that_is_cancelled_is_given_up_everywhere(
    stack: RunningStack, collector: Collector
) -> None:
    long = SamplingOverrides(max_tokens=1000, min_tokens=900)
    with Client(stack.address) as client:
        answer = client.chat("Talk for ever", text_sampling=long, codec_sampling=long)
        events = iter(answer)
        while not hasattr(next(events), "samples"):
            pass
        answer.cancel()
        with pytest.raises(CancelledRequestError):
            answer.result()
        request_id = answer.request_id
    assert request_id is not None
    trace = collector.request(request_id, *STAGES)
    assert (trace.root.error, trace.root.attributes["omnirelay.outcome"]) == (None, "cancelled")
    assert set(trace.root.events) == {"first_text", "first_audio"}
    spans = stage_spans(trace)
    # The text may have been written to its end before anything was heard, on a busy machine.
    assert spans.pop("thinker").attributes["omnirelay.outcome"] in ("aborted", "completed")
    for span in spans.values():
        assert (span.error, span.attributes["omnirelay.outcome"]) == (None, "aborted")


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
