"""What nobody wants any more leaves every stage, whenever it is given up.

How it is given up is in ``tests/gateway``: by a cancel, with its connection, at its deadline.
"""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from omnirelay import Client, GenerateRequest, SamplingOverrides, StatusReport
from omnirelay.errors import CancelledRequestError
from shared.messages import STAGES
from tests.support.http import Readings, get
from tests.support.processes import wait_until
from tests.support.stack import RunningStack

HELD = ("omnirelay_stage_held_bytes", "omnirelay_conditioning_rows_held", "omnirelay_kv_cache_usage_ratio")


def held(stack: RunningStack) -> list[float]:
    """All that the stages say that they hold."""
    values = []
    for stage in STAGES:
        told = Readings(get(stack.config["stages"][stage]["http"], "/metrics").metrics.values())
        for state in ("running", "waiting"):
            values.append(told("omnirelay_stage_requests", stage=stage, state=state))
        values += [told(name, stage=stage) for name in HELD if told.has(name, stage=stage)]
    return values


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
        wait_until(lambda: not any(held(stack)), "nothing is held", DEADLINE_S)


def test_speech_that_ends_before_its_text_refuses_nothing(stack: RunningStack) -> None:
    with Client(stack.address) as client:
        before = refused(idle(client))
        done = client.chat(request_for(1, text_tokens=60, codec_tokens=1)).result().done
        assert (len(done.text_token_ids), len(done.codec_token_ids)) == (60, 1)
        assert refused(idle(client)) == before
