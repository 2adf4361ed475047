"""A request that may end the engine is computed alone, and its gateway knows before that."""

from shared.messages import Closing, Peers, TextDelta
from tests.shared.support import Context, wait_until
from tests.shared.test_gateways import Gateway, pair, shared


def confirm(gateway: Gateway, request_id: str | None) -> None:
    """Hear that a request is computed alone, and confirm it."""
    wait_until(lambda: gateway.beat is not None and gateway.beat.alone == request_id, gateway.hear)
    gateway.tell(Peers(gateway=gateway.name, alone=request_id))


def test_a_stage_computes_nothing_before_the_gateway_knows_what_is_computed_alone(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other) as stage:
        first, second = f"{one.name}1", f"{other.name}1"
        stage.service.alone = first
        stage.work(first)
        wait_until(lambda: one.beat is not None and one.beat.alone == first, one.hear)
        other.tell(Peers(gateway=other.name, alone=first))
        other.hear()
        assert other.beat is not None
        assert other.beat.alone is None
        assert stage.service.steps == 0
        other.tell(Peers(gateway=other.name))
        confirm(one, first)
        wait_until(lambda: bool(one.told), one.hear)
        assert isinstance(one.told[0], TextDelta)
        stage.service.alone = second
        stage.work(second)
        for gateway, alone in ((one, None), (other, second)):
            assert not other.told
            confirm(gateway, alone)
        wait_until(lambda: bool(other.told), other.hear)


def test_a_gateway_that_is_gone_does_not_keep_a_stage_waiting(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other) as stage:
        stage.service.alone = f"{one.name}1"
        stage.work(f"{one.name}1")
        wait_until(lambda: one.beat is not None and one.beat.alone is not None, one.hear)
        one.tell(Closing())
        wait_until(lambda: not stage.service.work)
        stage.service.alone = None
        stage.work(f"{other.name}1")
        wait_until(lambda: bool(other.told), other.hear)
