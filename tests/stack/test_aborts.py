"""What nobody wants any more leaves every stage, however and whenever it is given up."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from omnirelay import Client, GenerateRequest, SamplingOverrides, StatusReport
from omnirelay.errors import CancelledRequestError, DeadlineError, OmniRelayError
from shared.messages import STAGES
from tests.support.http import Readings, get
from tests.support.processes import wait_until
from tests.support.restarting import OPEN
from tests.support.stack import RunningStack

STREAMS = 8
LONG = SamplingOverrides(max_tokens=1000, min_tokens=900)
HELD = ("omnirelay_stage_held_bytes", "omnirelay_conditioning_rows_held", "omnirelay_kv_cache_usage_ratio")
WITHIN_S = 60.0
"""Generous: how soon it is, ``python -m tests.chaos --soak`` tells."""


def confirmed(stack: RunningStack) -> float:
    """Requests that all their stages have dropped."""
    told = Readings(get(stack.config["gateway"]["http"], "/metrics").metrics.values())
    return told("omnirelay_abort_seconds_count")


def held(stack: RunningStack) -> list[float]:
    """All that the stages say that they hold."""
    values = []
    for stage in STAGES:
        told = Readings(get(stack.config["stages"][stage]["http"], "/metrics").metrics.values())
        values += [
            told("omnirelay_stage_requests", stage=stage, state=state) for state in ("running", "waiting")
        ]
        values += [told(name, stage=stage) for name in HELD if told.has(name, stage=stage)]
    return values


@pytest.mark.parametrize("way", ["cancel", "disconnect", "deadline"])
def test_eight_streams_that_are_given_up_leave_nothing_at_the_stages(stack: RunningStack, way: str) -> None:
    before = confirmed(stack)
    deadline_s = 2.0 if way == "deadline" else None
    told: list[OmniRelayError] = []
    with ExitStack() as leaving:
        clients = [leaving.enter_context(Client(stack.address)) for _ in range(STREAMS)]
        answers = [
            client.chat("Talk for ever", text_sampling=LONG, codec_sampling=LONG, deadline_s=deadline_s)
            for client in clients
        ]
        with Client(stack.address) as other:
            begun = OPEN[OPEN.index("thinking") :]
            wait_until(lambda: way == "deadline" or any(map(other.status().requests.get, begun)), "a begin")
        if way == "disconnect":
            leaving.close()
        for answer in answers if way != "disconnect" else []:
            if way == "cancel":
                answer.cancel()
            with pytest.raises((CancelledRequestError, DeadlineError)) as ended:
                answer.result()
            told.append(ended.value)
    expected = {"cancel": CancelledRequestError, "deadline": DeadlineError}
    assert all(isinstance(each, expected[way]) for each in told)
    with Client(stack.address) as client:
        wait_until(lambda: not any(client.status().requests[state] for state in OPEN), "they end", WITHIN_S)
    wait_until(lambda: confirmed(stack) > before, "an abort is confirmed", WITHIN_S)
    wait_until(lambda: not any(held(stack)), "nothing is held", WITHIN_S)


DEADLINE_S = 60.0


def request_for(number: int, text_tokens: int, codec_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=[number + 1] * (1 + number % 60),
        seed=number,
        text_sampling=SamplingOverrides(max_tokens=text_tokens, min_tokens=text_tokens),
        codec_sampling=SamplingOverrides(max_tokens=codec_tokens, min_tokens=codec_tokens),
    )


def refused(report: StatusReport) -> dict[str, int]:
    return {stage.name: stage.load.refused for stage in report.stages}


def idle(client: Client) -> StatusReport:
    """The status once every stage has said anew, twice in a row, that it holds nothing."""
    deadline = time.monotonic() + DEADLINE_S
    beats: Counter[str] = Counter()
    last_age: dict[str, float] = {}
    while True:
        report = client.status()
        for stage in report.stages:
            age, load = stage.heartbeat_age_s or 0.0, stage.load
            if load.running or load.waiting or load.held_bytes:
                beats[stage.name] = 0
            elif age < last_age.get(stage.name, 0.0):
                beats[stage.name] += 1
            last_age[stage.name] = age
        if all(beats[stage.name] >= 2 for stage in report.stages):
            return report
        assert time.monotonic() < deadline, f"not idle: {report.stages}"
        time.sleep(0.02)


def test_cancels_at_any_moment_leave_nothing_and_refuse_nothing(stack: RunningStack) -> None:
    moments = random.Random(1)

    def cancelled(number: int) -> bool:
        answer = client.chat(request_for(number, text_tokens=60, codec_tokens=200))
        events = iter(answer)
        try:
            for _ in range(moments.randrange(30)):
                next(events)
            answer.cancel()
            answer.result()
        except CancelledRequestError:
            return True
        return False

    with Client(stack.address) as client:
        before = refused(idle(client))
        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(cancelled, range(32))) > 16
        assert refused(idle(client)) == before


def test_speech_that_ends_before_its_text_refuses_nothing(stack: RunningStack) -> None:
    with Client(stack.address) as client:
        before = refused(idle(client))
        done = client.chat(request_for(1, text_tokens=60, codec_tokens=1)).result().done
        assert (len(done.text_token_ids), len(done.codec_token_ids)) == (60, 1)
        assert refused(idle(client)) == before
