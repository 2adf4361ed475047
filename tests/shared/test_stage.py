"""The loop of a stage, over real sockets: what it takes, refuses, reports and survives; codes of errors."""

import inspect
import logging
import math
import os
import time
from typing import Any

import pytest
import zmq

from omnirelay import errors
from omnirelay.errors import (
    EngineFailedError,
    InvalidRequestError,
    MessageError,
    OmniRelayError,
    PayloadError,
    QueueFullError,
    RepeatedMessageError,
    RequestError,
    SequenceError,
    StageFailedError,
    UnknownSpeakerError,
)
from shared.messages import AbortDone, RequestFailed, StageEvent, TextDelta
from shared.stage import loop
from shared.stage.service import Failures
from shared.transport.wire import VERSION_BYTE, Decoder, encode
from tests.shared.stages import INSTANCE, STAGE, EchoService, Harness, running
from tests.shared.support import wait_until


@pytest.fixture
def harness(context):
    with running(context) as harness:
        yield harness


def delta(request_id: str, seq: int) -> TextDelta:
    return TextDelta(request_id=request_id, seq=seq, token_ids=[seq])


def by_request(events: list[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for event in events:
        found.setdefault(event.request_id, []).append(event)
    return found


def test_messages_are_worked_on_and_answered_in_order(harness):
    for seq in range(20):
        harness.send("a", seq)
        harness.send("b", seq)
    events = by_request(harness.take(40))
    assert events == {name: [delta(name, seq) for seq in range(20)] for name in ("a", "b")}
    assert harness.error is None


def test_an_abort_drops_the_request_and_what_still_comes_for_it(harness):
    harness.send("a", 0)
    assert harness.take(1) == [delta("a", 0)]
    assert harness.abort("a") == AbortDone(request_id="a", stage=STAGE, instance=INSTANCE)
    assert harness.service.aborts == ["a"]
    assert harness.service.active_requests() == []
    harness.send("a", 1)
    harness.send("b", 0)
    assert harness.take(1) == [delta("b", 0)]
    assert harness.service.active_requests() == ["b"]
    assert not harness.inbox.refused


def test_an_abort_drops_what_waits_for_a_peer_that_is_away(context):
    """Else one dead request's rows would take the room of others until the peer is back."""
    with running(context) as harness:
        harness.absent.put(delta("other", 0))
        other_bytes = harness.absent.backlog_bytes
        harness.absent.put(TextDelta(request_id="dead", seq=0, token_ids=[1] * 600))
        assert harness.absent.backlog_bytes > other_bytes
        harness.abort("dead")
        wait_until(lambda: harness.absent.backlog_bytes == other_bytes)


def test_only_the_latest_aborts_are_remembered(context, monkeypatch):
    monkeypatch.setattr(loop, "REMEMBERED_ENDS", 2)
    with running(context) as harness:
        for request_id in ("first", "second", "third"):
            harness.abort(request_id)
        for request_id in ("third", "second", "first"):
            harness.send(request_id, 0)
        assert harness.take(1) == [delta("first", 0)]
        assert harness.service.active_requests() == ["first"]


@pytest.mark.parametrize(
    ("where", "error", "code"),
    [
        ("accept_errors", UnknownSpeakerError("no voice Bob"), "unknown_speaker"),
        ("accept_errors", InvalidRequestError("no"), "invalid_request"),
        ("accept_errors", QueueFullError("full"), QueueFullError.code),
        ("accept_errors", KeyError("nobody expected this"), "stage_failed"),
        ("step_failures", InvalidRequestError("codec id 9000 is out of range"), "invalid_request"),
    ],
)
def test_a_request_that_cannot_be_served_fails_with_its_reason_and_alone(harness, where, error, code):
    harness.send("good", 0)
    harness.take(1)
    getattr(harness.service, where)["bad"] = error
    harness.send("bad", 0)
    failure = harness.take_failure()
    assert (failure.request_id, failure.stage, failure.code) == ("bad", STAGE, code)
    assert failure.message == str(error) or (code == "stage_failed" and "KeyError" in failure.message)
    # Its sender could not know better: only messages that are wrong in themselves count as refused.
    harness.send("bad", 1)
    harness.send("good", 1)
    assert harness.take(1) == [delta("good", 1)]
    assert harness.service.active_requests() == ["good"]
    assert harness.service.aborts == ["bad"]
    assert not harness.inbox.refused


def test_a_refused_message_fails_its_own_living_request_only(harness):
    for request_id in ("a", "b"):
        harness.send(request_id, 0)
    harness.take(2)
    harness.service.accept_errors["a"] = PayloadError("rows.shape", "rows are 3 wide, this stage takes 4")
    harness.send("a", 1)
    failure = harness.take_failure()
    assert (failure.request_id, failure.code) == ("a", "stage_failed")
    assert failure.message == "payload_invalid: rows.shape: rows are 3 wide, this stage takes 4"
    harness.send("b", 1)
    assert harness.take(1) == [delta("b", 1)]
    assert harness.service.active_requests() == ["b"]
    assert harness.inbox.refused == {"payload_invalid": 1}


@pytest.mark.parametrize(
    ("error", "request_id", "code"),
    [
        (SequenceError("request ghost is not known here"), "ghost", "sequence_invalid"),
        (RepeatedMessageError("message 0 came twice"), "a", "message_repeated"),
    ],
)
def test_a_message_of_nobody_or_a_repeated_one_is_counted_and_fails_nobody(harness, error, request_id, code):
    harness.send("a", 0)
    harness.take(1)
    harness.service.accept_errors[request_id] = error
    harness.send(request_id, 0)
    harness.send("a", 1)
    assert harness.take(1) == [delta("a", 1)]
    assert harness.service.active_requests() == ["a"]
    assert harness.inbox.refused == {code: 1}
    assert harness.service.aborts == []


def test_a_reason_longer_than_a_message_may_be_is_cut(harness):
    harness.service.accept_errors["a"] = InvalidRequestError("x" * 10_000)
    harness.send("a", 0)
    assert harness.take_failure().message == "x" * 4096


def start_two(harness: Harness) -> None:
    for request_id in ("a", "b"):
        harness.send(request_id, 0)
    harness.take(2)


@pytest.mark.parametrize("abort_error", [None, RuntimeError("the engine is dead")])
def test_a_step_that_raises_ends_the_loop_and_every_living_request_is_reported(harness, abort_error):
    start_two(harness)
    harness.service.step_error = MemoryError("the device is full")
    harness.service.abort_error = abort_error
    harness.send("a", 1)
    harness.thread.join(timeout=60)
    events = by_request(harness.take(2))
    assert events.keys() == {"a", "b"}
    for (failure,) in events.values():
        assert (failure.stage, failure.code) == (STAGE, "engine_failed")
        assert "engine failed: MemoryError('the device is full')" in failure.message
    assert isinstance(harness.error, EngineFailedError)
    assert harness.error.__cause__ is harness.service.step_error


def test_a_step_that_raises_is_put_down_to_the_request_it_computed_alone(harness):
    start_two(harness)
    harness.service.alone = "b"
    harness.service.step_error = MemoryError("the device is full")
    harness.send("a", 1)
    harness.thread.join(timeout=60)
    failure = harness.take_failure()
    assert (failure.request_id, failure.code) == ("b", "poison_request")


def test_a_gateway_that_takes_nothing_pauses_the_work_and_it_resumes(context):
    with running(context, listening=False, max_backlog_bytes=4000) as harness:
        for seq in range(100):
            harness.send("a", seq, tokens=20)
        wait_until(lambda: harness.gateway.backlog_bytes > 0)
        # What waits is what one step has made.
        steps = harness.service.steps
        assert steps == 1
        # Controls and inbox are served while the work pauses.
        harness.send("late", 0)
        assert harness.abort("late").request_id == "late"
        assert harness.next_heartbeat().load.outbox_bytes > 0
        assert harness.service.steps == steps
        harness.listen()
        events = harness.take(100)
    assert [event.seq for event in events] == list(range(100))
    assert harness.service.steps == 100


def test_a_failure_that_cannot_be_reported_does_not_end_the_stage(context):
    with running(context, listening=False, max_backlog_bytes=10) as harness:
        harness.service.accept_errors["a"] = InvalidRequestError("no")
        harness.send("a", 0)
        wait_until(lambda: harness.service.aborts == ["a"])
        assert harness.abort("b").request_id == "b"
        assert harness.error is None


def test_an_idle_stage_sends_heartbeats_that_say_what_it_holds(harness):
    first = harness.next_heartbeat()
    assert (first.stage, first.pid) == (STAGE, os.getpid())
    assert first.limits == harness.service.limits
    assert first.load.running == 0
    assert first.peak_memory_bytes > 10_000_000
    harness.raw.send(VERSION_BYTE + b"spam")
    harness.router.send_multipart([STAGE.encode(), VERSION_BYTE + b"spam"])
    harness.send("a", 0)
    harness.take(1)
    seen = [first.load]
    wait_until(
        lambda: (seen[-1].refused, seen[-1].steps, seen[-1].outbox_bytes) == (2, 1, 0),
        meanwhile=lambda: seen.append(harness.next_heartbeat().load),
    )
    assert (seen[-1].running, seen[-1].held_bytes) == (1, 123)


def test_a_connection_that_has_ended_is_told_at_once_and_from_then_on(context):
    with running(context, heartbeat_s=1.0) as harness:
        harness.gateway.link.take(zmq.EVENT_DISCONNECTED)
        for _ in range(2):
            wait_until(lambda: harness.next_heartbeat().breaks == {"gateway": 1})


def test_an_idle_loop_does_not_spin(context):
    with running(context, heartbeat_s=0.2) as harness:
        harness.next_heartbeat()
        wall, used = time.monotonic(), time.process_time()
        for _ in range(3):
            harness.next_heartbeat()
        assert time.process_time() - used < 0.5 * (time.monotonic() - wall)


def test_a_loop_without_messages_steps_when_the_service_said(context):
    """And not only with the next report, half a minute later."""

    class Punctual(EchoService):
        """Is ready from a time on, once."""

        wake_at = math.inf

        @property
        def ready(self) -> bool:
            return time.monotonic() >= self.wake_at

        def accept(self, message: Any) -> None:
            super().accept(message)
            self.wake_at = asked

        def step(self) -> dict[str, OmniRelayError]:
            self.wake_at = math.inf
            return super().step()

    service = Punctual()
    with running(context, heartbeat_s=60.0, service=service) as harness:
        asked = time.monotonic() + 0.2
        harness.send("a", 0)
        assert harness.take(1) == [delta("a", 0)]
        assert service.steps == 1
        assert time.monotonic() >= asked
        harness.loop.stop()
        # It sleeps until its next report, or until a message comes.
        harness.send("a", 1)


CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, OmniRelayError) and value.__module__ == errors.__name__
]


def test_every_error_has_a_code_of_its_own():
    codes = [error.__dict__.get("code") for error in CLASSES]
    assert len(CLASSES) > 20
    assert None not in codes
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("error", CLASSES)
def test_a_code_is_a_lower_case_word_that_fits_in_a_message(error):
    assert error.code.replace("_", "").isalpha()
    assert error.code == error.code.lower()
    failed = RequestFailed(request_id="a", stage="talker", code=error.code, message="")
    assert Decoder[RequestFailed](StageEvent).decode(encode(failed)) == failed
    # The stage loop tells the two apart by their base classes.
    assert not (issubclass(error, RequestError) and issubclass(error, MessageError))


def test_whatever_is_raised_for_one_request_is_its_own_failure(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    full = QueueFullError("no room")
    with failures.only("full"):
        raise full
    assert not caplog.records, "the loop logs what it is told"
    with failures.only("odd"):
        raise KeyError("no such thing")
    with failures.only("good"):
        pass
    assert failures["full"] is full
    assert isinstance(failures["odd"], StageFailedError)
    assert "KeyError('no such thing')" in str(failures["odd"])
    assert failures.keys() == {"full", "odd"}
    (record,) = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    assert "request odd" in record.message


def test_who_is_told_to_end_ends() -> None:
    with pytest.raises(KeyboardInterrupt), Failures().only("any"):
        raise KeyboardInterrupt
