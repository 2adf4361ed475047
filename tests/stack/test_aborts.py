"""What nobody wants any more leaves every stage, however it is given up."""

from contextlib import ExitStack

import pytest

from omnirelay import Client, SamplingOverrides
from omnirelay.errors import CancelledRequestError, DeadlineError, OmniRelayError
from shared.messages import STAGES
from tests.support.http import Readings, get
from tests.support.processes import wait_until
from tests.support.stack import RunningStack

STREAMS = 8
LONG = SamplingOverrides(max_tokens=1000, min_tokens=900)
HELD = ("omnirelay_stage_held_bytes", "omnirelay_conditioning_rows_held", "omnirelay_kv_cache_usage_ratio")
LIVING = ("received", "queued", "thinking", "talking", "synthesizing")
WITHIN_S = 60.0
"""Generous: how soon it is, ``python -m tests.chaos --aborts`` measures."""


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
            wait_until(lambda: other.status().requests["thinking"] >= 1 or way == "deadline", "they begin")
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
        wait_until(lambda: not any(client.status().requests[state] for state in LIVING), "they end", WITHIN_S)
    wait_until(lambda: confirmed(stack) > before, "an abort is confirmed", WITHIN_S)
    wait_until(lambda: not any(held(stack)), "nothing is held", WITHIN_S)
