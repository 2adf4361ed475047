"""A request that has to be alone at a stage, beside those of other gateways."""

import pytest

from omnirelay.errors import StageReservedError
from shared.messages import (
    Begin,
    Cleared,
    Closing,
    CodecTokens,
    RequestFailed,
    Route,
    Sampling,
    SpeechSettings,
    SynthesisStart,
    TextDelta,
)
from shared.stage.membership import RESERVED_S, Isolation
from tests.shared.stages import INSTANCE, STAGE
from tests.shared.support import Context, wait_until
from tests.shared.test_gateways import Gateway, Shared, pair, shared

ROUTE = Route(thinker="x", token2wav=INSTANCE)
ALONE = Route(thinker="x", token2wav=INSTANCE, alone=(STAGE,))
ELSEWHERE = Route(thinker="x", token2wav=INSTANCE, alone=("thinker",))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_that_is_alone_keeps_all_others_out() -> None:
    isolation = Isolation(STAGE)
    isolation.check("aaaa1", ALONE, [])
    assert isolation.asks == "aaaa1"
    for route in (ROUTE, ELSEWHERE):
        with pytest.raises(StageReservedError):
            isolation.check("bbbb1", route, ["aaaa1"])
    isolation.end("bbbb1")
    assert isolation.asks == "aaaa1"
    isolation.end("aaaa1")
    assert isolation.asks is None
    # One that has ended of itself is not there any more.
    isolation.check("bbbb1", ROUTE, ["cccc1"])


def test_one_that_has_begun_is_alone_until_it_is_cleared() -> None:
    isolation = Isolation(STAGE)
    isolation.check("aaaa1", ALONE, [])
    isolation.begin("aaaa1")
    assert isolation.asks is None
    with pytest.raises(StageReservedError):
        isolation.check("bbbb1", ROUTE, ["aaaa1"])
    isolation.end("bbbb1")
    with pytest.raises(StageReservedError):
        isolation.check("bbbb1", ROUTE, ["aaaa1"])
    isolation.end("aaaa1")
    isolation.check("bbbb1", ROUTE, ["aaaa1"])


def test_one_that_has_to_be_alone_waits_for_others_and_nothing_new_comes_before_it() -> None:
    clock = Clock()
    isolation = Isolation(STAGE, clock)
    isolation.check("bbbb1", ROUTE, [])
    isolation.check("bbbb2", ELSEWHERE, ["bbbb1"])
    with pytest.raises(StageReservedError, match="others are there"):
        isolation.check("aaaa1", ALONE, ["bbbb1"])
    assert isolation.asks is None
    with pytest.raises(StageReservedError, match="a request waits"):
        isolation.check("bbbb3", ROUTE, ["bbbb1"])
    isolation.check("aaaa1.1", ALONE, [])
    isolation.end("aaaa1.1")
    isolation.check("bbbb3", ROUTE, [])
    # One that does not come again is not waited for.
    with pytest.raises(StageReservedError):
        isolation.check("aaaa2", ALONE, ["bbbb3"])
    clock.now += RESERVED_S - 0.1
    with pytest.raises(StageReservedError):
        isolation.check("bbbb4", ROUTE, [])
    clock.now += 0.1
    isolation.check("bbbb4", ROUTE, [])


def begin(stage: Shared, request_id: str, route: Route = ROUTE) -> None:
    """Let a request come, with work for one step."""
    speech = SpeechSettings(speaker="Chelsie", sampling=Sampling(max_tokens=1), seed=0)
    stage._sender.put(SynthesisStart(request_id=request_id, priority=0, speech=speech, route=route))
    stage._sender.put(CodecTokens(request_id=request_id, seq=0, token_ids=[1]))
    wait_until(lambda: stage._sender.backlog_bytes == 0, stage._sender.flush)


def heard(gateway: Gateway, count: int) -> list[object]:
    wait_until(lambda: len(gateway.told) >= count, gateway.hear)
    return gateway.told


def test_a_stage_computes_nothing_before_the_gateway_knows_that_a_request_is_alone(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other) as stage:
        begin(stage, f"{one.name}1", ALONE)
        # It is told again and again, as the first word may be lost.
        wait_until(lambda: one.alone == [f"{one.name}1"] * 3, one.hear)
        begin(stage, f"{other.name}1")
        (refused,) = heard(other, 1)
        assert isinstance(refused, RequestFailed)
        assert refused.code == "stage_reserved"
        other.tell(Begin(request_id=f"{other.name}1"))
        assert stage.service.steps == 0
        assert other.alone == []
        one.tell(Begin(request_id=f"{one.name}1"))
        assert isinstance(heard(one, 1)[0], TextDelta)
        assert stage.service.steps > 0
        one.tell(Cleared(request_id=f"{one.name}1"))
        stage.work(f"{one.name}1", seq=1)
        heard(one, 2)
        begin(stage, f"{other.name}2")
        assert isinstance(heard(other, 2)[1], TextDelta)


def test_a_gateway_that_is_gone_does_not_keep_a_stage_waiting(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other) as stage:
        begin(stage, f"{one.name}1", ALONE)
        wait_until(lambda: bool(one.alone), one.hear)
        one.tell(Closing())
        wait_until(lambda: stage.membership.isolation.asks is None)
        begin(stage, f"{other.name}1")
        assert isinstance(heard(other, 1)[0], TextDelta)
