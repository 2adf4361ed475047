"""Chooses the replicas of an attempt."""

from collections.abc import Set
from functools import partial

from gateway.dispatch.registry import Replica, StageRegistry
from shared.messages import Route, StageName


def place(
    registry: StageRegistry,
    speech: bool,
    avoid: Set[tuple[StageName, str]] = frozenset(),
    closed: Set[tuple[StageName, str]] = frozenset(),
) -> Route | None:
    """Choose the least loaded replicas that are connected to each other; none if there is no route now.

    A replica is used only once its sender has confirmed that it knows its address.

    Args:
        speech: Without it the thinker alone is needed.
        avoid: Used only if there is no other: the request failed there.
        closed: Not used.
    """
    candidates = partial(_candidates, registry, avoid, closed)
    thinkers = candidates("thinker")
    if not speech:
        return Route(thinker=thinkers[0].name) if thinkers else None
    talkers, last = candidates("talker"), candidates("token2wav")
    ends = {each.name: next((end.name for end in last if end.name in each.peers), None) for each in talkers}
    for thinker in thinkers:
        for name, token2wav in ends.items():
            if token2wav is not None and name in thinker.peers:
                return Route(thinker=thinker.name, talker=name, token2wav=token2wav)
    return None


def _candidates(
    registry: StageRegistry,
    avoid: Set[tuple[StageName, str]],
    closed: Set[tuple[StageName, str]],
    stage: StageName,
) -> list[Replica]:
    able = [each for each in registry.ready(stage) if (stage, each.name) not in closed]
    return sorted(able, key=lambda each: (stage, each.name) in avoid)
