"""What a running stage tells over HTTP: its metrics move when they should, its health is what it is."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from omnirelay.errors import InvalidRequestError, OmniRelayError, UnknownSpeakerError
from shared.messages import Closing, Heartbeat
from shared.stage.endpoint import HttpEndpoint, StageHealth
from shared.stage.heartbeat import HeartbeatThread
from shared.stage.metrics import StageMetrics
from shared.transport.control import ControlClient
from shared.transport.metrics import EdgeMetrics
from shared.transport.wire import encode
from tests.shared.stages import STAGE, Harness, running
from tests.shared.support import DEADLINE_S, Context, free_address, wait_until
from tests.shared.test_control import heartbeat
from tests.support.http import Answer, Readings, get, registry_of

OURS = {"stage": STAGE}


class Watched:
    """A running stage with an endpoint of its own."""

    def __init__(self, harness: Harness, step_timeout_s: float, *more: Collector) -> None:
        self.harness = harness
        self.address = free_address()
        self.health = StageHealth(step_timeout_s)
        edges = EdgeMetrics(STAGE, {"gateway": harness.gateway}, harness.inbox, harness._control.refused)
        stage = StageMetrics(harness.service, harness.loop, harness.membership)
        self.endpoint = HttpEndpoint(
            self.address,
            self.health.why_not_live,
            self.health.why_not_ready,
            registry_of(stage, edges, *more),
        )

    def get(self, path: str) -> Answer:
        return get(self.address, path)

    def read(self) -> Readings:
        return Readings(self.get("/metrics").metrics.values())


@contextmanager
def watched(context: Context, *more: Collector, step_timeout_s: float = 300.0) -> Iterator[Watched]:
    with running(context) as harness:
        stage = Watched(harness, step_timeout_s, *more)
        with stage.endpoint:
            stage.health.loaded(harness.loop)
            yield stage


@pytest.fixture
def stage(context: Context) -> Iterator[Watched]:
    with watched(context) as stage:
        yield stage


def test_steps_messages_and_what_is_held_are_told(stage: Watched) -> None:
    for seq in range(5):
        stage.harness.send("a", seq)
    stage.harness.take(5)
    # The last heartbeat says what the loop held when it last came round.
    wait_until(lambda: stage.read().has("omnirelay_stage_requests", **OURS, state="running"))
    wait_until(lambda: stage.read()("omnirelay_stage_requests", **OURS, state="running") == 1)
    # And what is sent is counted after it.
    wait_until(lambda: stage.read()("omnirelay_edge_sent_messages_total", **OURS, edge="gateway") == 5)
    steps = stage.harness.service.steps
    wait_until(lambda: stage.read()("omnirelay_stage_step_seconds_count", **OURS) == steps > 0)
    read = stage.read()
    assert read("omnirelay_stage_held_bytes", **OURS) == 123
    assert 0 < read("omnirelay_stage_step_seconds_sum", **OURS) < 20
    assert read("omnirelay_edge_received_messages_total", **OURS, edge=STAGE) == 5


def test_the_loops_time_is_told_by_what_it_went_to(context: Context) -> None:
    before = time.perf_counter()
    with running(context) as harness:
        echo = harness.service.step

        def step() -> dict[str, OmniRelayError]:
            harness.service.model_time.seconds += 0.25
            return echo()

        harness.service.step = step  # type: ignore[method-assign]
        for seq in range(3):
            harness.send("a", seq)
        harness.take(3)
        stage = StageMetrics(harness.service, harness.loop, harness.membership)
        # The loop accounts for a step's time after it has sent what the step gave.
        wait_until(lambda: harness.loop.seconds["model"] == 0.25 * harness.service.steps)
        wait_until(lambda: harness.loop.seconds["send"] >= harness.gateway.busy_s > 0)
        read = Readings(registry_of(stage).collect())
        spent = {
            activity: read("omnirelay_stage_seconds_total", **OURS, activity=activity)
            for activity in ("wait", "take", "model", "engine", "send")
        }
    assert spent["model"] == 0.25 * harness.service.steps
    # What the model claims to have taken is missing elsewhere.
    assert sum(spent.values()) <= time.perf_counter() - before
    assert min(spent["wait"], spent["take"], spent["send"]) > 0


def test_failures_are_counted_by_code_wherever_they_happen(stage: Watched) -> None:
    harness = stage.harness
    harness.service.accept_errors = {"a": UnknownSpeakerError("no"), "b": UnknownSpeakerError("no")}
    harness.service.step_failures = {"c": InvalidRequestError("no")}
    for request_id in "abc":
        harness.send(request_id)
    harness.take(3)
    read = stage.read()
    assert read("omnirelay_stage_failures_total", **OURS, reason="unknown_speaker") == 2
    assert read("omnirelay_stage_failures_total", **OURS, reason="invalid_request") == 1


def test_requests_that_nobody_wants_any_more_are_counted_by_reason(stage: Watched) -> None:
    harness, dropped = stage.harness, "omnirelay_stage_drops_total"
    assert stage.read()(dropped, **OURS, reason="aborted") == 0
    for request_id in ("a", "b", "c"):
        harness.send(request_id)
    harness.take(3)
    assert harness.abort("a")
    assert harness.abort("nobodys")
    assert stage.read()(dropped, **OURS, reason="aborted") == 1
    harness.router.send_multipart([STAGE.encode(), *encode(Closing())])
    wait_until(lambda: stage.read()(dropped, **OURS, reason="orphaned") == 2)


def test_heartbeats_are_counted_and_name_the_process(stage: Watched) -> None:
    first = stage.harness.next_heartbeat()
    second = stage.harness.next_heartbeat()
    assert first.instance == second.instance
    # A heartbeat is counted when it has been sent, and may be here before.
    wait_until(lambda: stage.read()("omnirelay_heartbeats_sent_total", **OURS) >= 2)
    read = stage.read()
    assert read("omnirelay_stage_info", **OURS, instance_id=first.instance) == 1


def test_a_heartbeat_that_is_late_is_counted(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    sent: list[bool] = []

    def send(_: ControlClient, __: Heartbeat) -> bool:
        sent.append(released.wait(DEADLINE_S))
        return False

    monkeypatch.setattr(ControlClient, "send", send)
    heart = HeartbeatThread(context, free_address(), STAGE, 0.01)
    heart.note(heartbeat())
    heart.start()
    threading.Timer(0.1, released.set).start()
    wait_until(lambda: heart.late >= 1)
    heart.stop()
    assert heart.sent == 0
    assert sent


def test_a_stage_is_ready_once_its_loop_comes_round() -> None:
    health = StageHealth(300)
    loop: Any = SimpleNamespace(report=None)
    assert health.why_not_ready() == "the model is being loaded"
    assert health.why_not_live() is None
    health.loaded(loop)
    assert health.why_not_ready() == "the stage's loop has not begun"
    assert health.why_not_live() is None
    loop.report = heartbeat()
    assert health.why_not_ready() is None
    health.ended()
    assert health.why_not_ready() == health.why_not_live() == "the stage's loop has ended"


def test_a_hung_step_is_told_until_it_ends(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(context, step_timeout_s=0.3) as stage:
        wait_until(lambda: stage.get("/readyz").status == 200)
        released = threading.Event()
        step = stage.harness.service.step

        def hang() -> dict[str, OmniRelayError]:
            assert released.wait(DEADLINE_S)
            return step()

        monkeypatch.setattr(stage.harness.service, "step", hang)
        stage.harness.send("a")
        wait_until(lambda: stage.get("/livez").status == 503)
        for path in ("/livez", "/readyz"):
            answer = stage.get(path)
            assert answer.status == 503
            assert "in one step for" in answer.json["reason"]
            assert "gateway.step_timeout_s (0.3 s)" in answer.json["reason"]
        # What does not need the loop is told all the same.
        assert stage.read()("omnirelay_edge_received_messages_total", **OURS, edge=STAGE) == 1
        released.set()
        stage.harness.take(1)
        wait_until(lambda: stage.get("/livez").status == stage.get("/readyz").status == 200)


def test_the_loop_does_not_wait_for_a_scrape(context: Context) -> None:
    armed, entered, released = threading.Event(), threading.Event(), threading.Event()

    class Slow(Collector):
        def collect(self) -> Iterator[Metric]:
            # Not when it is registered, which asks too.
            if armed.is_set():
                entered.set()
                assert released.wait(DEADLINE_S)
            return iter(())

    with watched(context, Slow()) as stage:
        armed.set()
        scraped: list[int] = []
        scrape = threading.Thread(target=lambda: scraped.append(stage.get("/metrics").status))
        scrape.start()
        assert entered.wait(DEADLINE_S)
        for seq in range(100):
            stage.harness.send("a", seq)
        stage.harness.take(100)
        assert not scraped
        released.set()
        scrape.join(DEADLINE_S)
        assert scraped == [200]


def test_scrapes_while_it_works_are_whole(stage: Watched) -> None:
    """Read by another thread at any time: nothing is torn, and nothing goes backwards."""
    done = threading.Event()
    counts: list[float] = []

    def scrape() -> None:
        while not done.is_set():
            read = stage.read()
            counts.append(read("omnirelay_stage_step_seconds_count", **OURS))
            buckets = read("omnirelay_stage_step_seconds_bucket", **OURS, le="+Inf")
            assert counts[-1] == buckets

    thread = threading.Thread(target=scrape)
    thread.start()
    for seq in range(300):
        stage.harness.send("a", seq)
    stage.harness.take(300)
    done.set()
    thread.join(DEADLINE_S)
    assert counts == sorted(counts)
    wait_until(lambda: stage.read()("omnirelay_edge_sent_messages_total", **OURS, edge="gateway") == 300)
