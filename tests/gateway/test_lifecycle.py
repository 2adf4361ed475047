"""The state machine, the record of a request, and the small objects around them."""

import asyncio
import gc
import itertools
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.aborts import AbortLedger
from gateway.fairness.admission import Admission
from gateway.fairness.thread import FairThread
from gateway.requests.lifecycle import ENDED, TRANSITIONS, Lifecycle, RequestState, StateCounts
from gateway.requests.record import Delta, RequestRecord
from omnirelay.errors import EmptyPromptError, SequenceError, StateTransitionError
from omnirelay.tasks import all_of, first_of
from shared.messages import (
    AudioChunk,
    CodecDelta,
    PromptUsage,
    Sampling,
    SpeechSettings,
    TextDelta,
    TextSampling,
    ThinkRequest,
)
from shared.messages.payloads import Blob
from tests.gateway.bench import Patch

STATES = list(RequestState)


def new_lifecycle() -> Lifecycle:
    return Lifecycle(StateCounts(), clock=map(float, itertools.count()).__next__)


def reach(state: RequestState) -> Lifecycle:
    """A lifecycle in a state, by the shortest way."""
    paths = [[RequestState.RECEIVED]]
    while paths[0][-1] is not state:
        path = paths.pop(0)
        paths += [[*path, following] for following in sorted(TRANSITIONS[path[-1]])]
    lifecycle = new_lifecycle()
    for each in paths[0][1:]:
        lifecycle.move(each)
    return lifecycle


@pytest.mark.parametrize(("start", "end"), list(itertools.product(STATES, STATES)))
def test_only_the_moves_of_the_table_are_possible(start: RequestState, end: RequestState) -> None:
    lifecycle = reach(start)
    if end in TRANSITIONS[start]:
        lifecycle.move(end)
        assert lifecycle.state is end
    else:
        with pytest.raises(StateTransitionError, match=f"{start} cannot become {end}"):
            lifecycle.move(end)
        assert lifecycle.state is start


def test_every_living_state_has_a_way_out_and_no_ended_one() -> None:
    assert {state for state in STATES if not TRANSITIONS[state]} == set(ENDED)
    for state in set(STATES) - ENDED:
        assert {RequestState.FAILED, RequestState.CANCELLED, RequestState.EXPIRED} <= TRANSITIONS[state]


def new_record(speech: bool) -> RequestRecord:
    sampling = Sampling(max_tokens=8)
    settings = SpeechSettings(speaker="Ethan", sampling=sampling, seed=1) if speech else None
    text = TextSampling(max_tokens=8)
    think = ThinkRequest(request_id="r", prompt_token_ids=[1], sampling=text, seed=1, speech=settings)
    record = RequestRecord(think, new_lifecycle())
    record.lifecycle.move(RequestState.QUEUED)
    record.lifecycle.move(RequestState.THINKING)
    return record


def deltas(kind: str, count: int) -> list[Delta]:
    ends = [index == count - 1 for index in range(count)]
    if kind == "audio":
        return [
            AudioChunk(request_id="r", seq=i, samples=1, data=Blob(bytes(4)), last=end)
            for i, end in enumerate(ends)
        ]
    make = TextDelta if kind == "text" else CodecDelta
    return [
        make(request_id="r", seq=i, token_ids=[i], finish_reason="stop" if end else None)
        for i, end in enumerate(ends)
    ]


@given(st.data())
def test_any_interleaving_of_the_streams_completes_exactly_at_its_end(data: st.DataObject) -> None:
    streams = {
        kind: deltas(kind, data.draw(st.integers(1, 4), label=kind)) for kind in ("text", "codec", "audio")
    }
    order = data.draw(st.permutations([kind for kind, each in streams.items() for _ in each]), label="order")
    record = new_record(speech=True)
    for position, kind in enumerate(order):
        record.apply(streams[kind].pop(0))
        record.advance()
        completed = record.lifecycle.state is RequestState.COMPLETED
        assert completed is (position == len(order) - 1)
        first_open = next((kind for kind, left in streams.items() if left), None)
        state = {"text": "thinking", "codec": "talking", "audio": "synthesizing", None: "completed"}
        assert record.lifecycle.state == state[first_open]
    assert not any(record.needs(stage) for stage in ("thinker", "talker", "token2wav"))


@given(st.data())
def test_one_message_out_of_place_is_noticed(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["text", "codec", "audio"]))
    stream = deltas(kind, 4)
    order = data.draw(st.permutations(range(4)).filter(lambda order: list(order) != [0, 1, 2, 3]))
    record = new_record(speech=True)

    def apply_all() -> None:
        for index in order:
            record.apply(stream[index])

    with pytest.raises(SequenceError, match=kind):
        apply_all()


def test_nothing_may_follow_the_end_of_a_stream() -> None:
    record = new_record(speech=False)
    record.apply(deltas("text", 1)[0])
    with pytest.raises(SequenceError, match="after the last"):
        record.apply(deltas("text", 2)[1])
    with pytest.raises(SequenceError, match="text-only"):
        record.apply(deltas("audio", 1)[0])


def test_what_the_prompt_came_to_is_told_once_with_the_first_text() -> None:
    told = PromptUsage(tokens=40, cached_tokens=16)
    record = new_record(speech=False)
    first, second = (TextDelta(request_id="r", seq=seq, token_ids=[1], prompt=told) for seq in (0, 1))
    assert record.prompt == PromptUsage(tokens=1)
    record.apply(first)
    assert record.prompt == told
    with pytest.raises(SequenceError, match="text message 1"):
        record.apply(second)
    late = new_record(speech=False)
    late.apply(TextDelta(request_id="r", seq=0, token_ids=[1]))
    with pytest.raises(SequenceError, match="text message 1"):
        late.apply(second)
    late.apply(TextDelta(request_id="r", seq=1, token_ids=[1]))
    assert late.prompt == PromptUsage(tokens=1)


def test_retry_time_follows_what_requests_take() -> None:
    admission = Admission(2, 0)
    before = admission.retry_after_ms()
    admission.enter("a", 0)
    admission.start("a")
    admission.leave("a", served_s=100.0)
    assert before < admission.retry_after_ms() <= 60_000


def test_aborts_are_bounded_and_repeated_until_confirmed(monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.dispatch.aborts.MAX_OPEN", 2)
    sent: list[tuple[str, str, str]] = []
    now = 0.0
    ledger = AbortLedger(
        lambda stage, name, abort: sent.append((stage, name, abort.request_id)), lambda _: None, lambda: now
    )
    for name in "abc":
        ledger.abort(name, [("thinker", "one"), ("talker", "two")])
    sent.clear()
    now = 10.0
    ledger.confirmed("talker", "two", "b")
    ledger.confirmed("thinker", "two", "b")
    ledger.resend("thinker", "one")
    ledger.resend("talker", "two")
    assert sent == [("thinker", "one", "b"), ("thinker", "one", "c"), ("talker", "two", "c")]
    ledger.resend("thinker", "one")
    assert len(sent) == 3
    now = 20.0
    ledger.forget("thinker", "one")
    ledger.resend("thinker", "one")
    assert len(sent) == 3


def test_an_abort_lasts_until_the_last_replica_has_confirmed_it() -> None:
    now = 0.0
    lasted: list[float] = []
    ledger = AbortLedger(lambda *_: None, lasted.append, lambda: now)
    for name in "ab":
        ledger.abort(name, [("thinker", "one"), ("talker", "two")])
    now = 1.0
    ledger.confirmed("talker", "two", "a")
    ledger.confirmed("talker", "two", "a")
    assert lasted == []
    now = 3.0
    ledger.confirmed("thinker", "one", "a")
    assert lasted == [3.0]
    ledger.forget("thinker", "one")
    ledger.confirmed("talker", "two", "b")
    assert lasted == [3.0], "what a replica took along was not dropped by it"
    ledger.abort("c", [("thinker", "one")])
    ledger.confirmed("thinker", "one", "c")
    assert lasted == [3.0, 0.0]


async def ends(name: str) -> str:
    return name


async def fails(name: str) -> str:
    raise ValueError(name)


async def stays(cancelled: list[str], name: str) -> str:
    try:
        return await asyncio.get_running_loop().create_future()
    finally:
        cancelled.append(name)


def test_all_results_come_in_order() -> None:
    assert asyncio.run(all_of(map(ends, "abc"))) == ["a", "b", "c"]


def test_what_ends_first_cancels_the_others() -> None:
    cancelled: list[str] = []
    assert asyncio.run(first_of(stays(cancelled, "a"), ends("b"), ends("c"))) == "b"
    with pytest.raises(ValueError, match="b"):
        asyncio.run(all_of([stays(cancelled, "c"), fails("b")]))
    with pytest.raises(ValueError, match="b"):
        asyncio.run(first_of(ends("a"), fails("b"), fails("c")))
    assert cancelled == ["a", "c"]


@pytest.mark.parametrize("how", [lambda *works: all_of(works), first_of])
def test_whoever_is_cancelled_leaves_nothing(how: Any) -> None:
    cancelled: list[str] = []
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(how(stays(cancelled, "a"), stays(cancelled, "b")), 0.01))
    assert cancelled == ["a", "b"]


async def test_an_error_that_nobody_waits_for_is_not_logged() -> None:
    """A cancelled request's prompt may be refused afterwards."""
    unhandled: list[dict[str, Any]] = []
    going, cancelled = threading.Event(), threading.Event()

    def refuse() -> None:
        going.set()
        cancelled.wait()
        raise EmptyPromptError("there is nothing")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    executor = FairThread("prompts")
    caller = asyncio.create_task(executor.run("a", refuse))
    await asyncio.to_thread(going.wait, 60)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    cancelled.set()
    # Behind it on the same thread.
    assert await executor.run("a", lambda: 3) == 3
    gc.collect()
    executor.close()
    assert unhandled == []
