"""Chooses the replicas of an attempt."""

from collections.abc import Iterable, Set
from typing import Final

from gateway.dispatch.registry import Replica, StageRegistry
from shared.messages import STAGES, Route, StageName

NEAR: Final = 4
"""A preferred thinker is used if it has at most so many requests more than another."""


def place(
    registry: StageRegistry,
    speech: bool,
    avoid: Set[tuple[StageName, str]] = frozenset(),
    near: str | None = None,
    alone: tuple[StageName, ...] = (),
) -> Route | None:
    """Choose the least loaded replicas that are connected to each other; none if there is no route now.

    Args:
        speech: Without it the thinker alone is needed.
        avoid: Used only if there is no other: the request failed there.
        near: The thinker that has computed the beginning of the prompt.
        alone: As in the route.
    """

    def candidates(stage: StageName, ready: Iterable[Replica]) -> list[Replica]:
        return sorted(ready, key=lambda each: (stage, each.name) in avoid)

    thinkers = candidates("thinker", thinkers_for(registry, near))
    if not speech:
        return Route(thinker=thinkers[0].name, alone=alone) if thinkers else None
    talkers, last = (candidates(stage, registry.ready(stage)) for stage in STAGES[1:])
    ends = {each.name: next((end.name for end in last if end.name in each.peers), None) for each in talkers}
    for thinker in thinkers:
        for name, token2wav in ends.items():
            if token2wav is not None and name in thinker.peers:
                return Route(thinker=thinker.name, talker=name, token2wav=token2wav, alone=alone)
    return None


def thinkers_for(registry: StageRegistry, near: str | None) -> list[Replica]:
    """The ready thinkers, the least loaded first; before them ``near``, unless it is much more loaded."""
    ready = registry.ready("thinker")
    if not ready:
        return []
    most = ready[0].work[0] + NEAR
    return sorted(ready, key=lambda each: each.name != near or each.work[0] > most)
