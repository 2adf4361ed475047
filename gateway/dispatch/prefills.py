"""Beginnings of prompts that thinkers compute before their requests come."""

import asyncio
import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.dispatch.aborts import AbortLedger
from gateway.dispatch.dispatcher import thinkers_for
from gateway.dispatch.registry import StageRegistry
from gateway.dispatch.stage_transport import StageTransport
from gateway.requests.metrics import GatewayMetrics, Outcome
from omnirelay.errors import BusyError, QueueFullError, StageUnavailableError
from shared.log import of_request
from shared.messages import RequestFailed, Route, StageEvent, TextDelta, ThinkRequest

MAX_BYTES: Final = 16 * 2**20
"""Of the media of a beginning, which are sent with each."""
MAX_CLIENTS: Final = 10_000
"""Clients whose spent tokens are remembered; the one that was idle longest is forgotten beyond this."""
BYTES_PER_TOKEN: Final = 1024
"""Of media, until the thinker has told how many tokens they are."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Open:
    thinker: str
    client: str
    done: "asyncio.Future[Outcome]"


@dataclass(eq=False)
class Prefills:
    """Sends beginnings to thinkers with room; a client has ``_allowance`` tokens between two requests."""

    _registry: StageRegistry
    _stages: StageTransport
    _aborts: AbortLedger
    _metrics: GatewayMetrics
    _allowance: int
    _open: dict[str, _Open] = field(default_factory=dict)
    _spent: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def __contains__(self, request_id: str) -> bool:
        """Whether a beginning is being computed."""
        return request_id in self._open

    def renew(self, client: str) -> None:
        """A client has made a request, and may have as much computed early as before."""
        self._spent.pop(client, None)

    def thinker_for(self, client: str, near: str | None = None) -> str | None:
        """A thinker, if possible ``near``, that may compute a beginning for this client now."""
        if self._spent.get(client, 0) >= self._allowance:
            return None
        able = thinkers_for(self._registry, near)
        most = sum(each.beat.limits.prefills for each in able)
        own = sum(each.client == client for each in self._open.values())
        # A client alone gets half of the places.
        if own and 2 * own >= most:
            return None
        held = Counter(each.thinker for each in self._open.values())
        for each in able:
            # No request waits there, either.
            if held[each.name] < each.beat.limits.prefills and not each.beat.load.waiting:
                return each.name
        return None

    async def compute(self, request: ThinkRequest, client: str, thinker: str) -> Outcome:
        """Have a beginning computed; if this is cancelled, it is aborted."""
        name = request.request_id
        outcome: Outcome = "aborted"
        opened = _Open(thinker, client, asyncio.get_running_loop().create_future())
        try:
            self._stages.think(msgspec.structs.replace(request, route=Route(thinker=thinker)))
        except (QueueFullError, StageUnavailableError) as error:
            log.debug("a beginning was not sent: %s", error)
            return self.counted("skipped")
        self._open[name] = opened
        size = sum(item.data.nbytes for item in request.media)
        estimate = len(request.prompt_token_ids) + size // BYTES_PER_TOKEN
        self._spend(client, estimate)
        try:
            outcome = await opened.done
        finally:
            del self._open[name]
            self.counted(outcome)
            if outcome == "aborted":
                self._aborts.abort(name, [("thinker", thinker)])
            elif outcome == "computed":
                self._spend(client, -estimate)
        return outcome

    def take(self, event: StageEvent) -> None:
        """A thinker has computed a beginning, or cannot."""
        opened = self._open[event.request_id]
        if isinstance(event, TextDelta) and event.prompt is not None and not opened.done.done():
            self._spend(opened.client, event.prompt.tokens - event.prompt.cached_tokens)
            opened.done.set_result("computed")
        elif isinstance(event, RequestFailed):
            about = of_request(event.request_id)
            log.info("the beginning %s of a prompt failed: %s", event.request_id, event.code, extra=about)
            self._end(event.request_id, "skipped" if event.code == BusyError.code else "failed")

    def check(self) -> None:
        """End the beginnings of thinkers that are lost; call it periodically."""
        if not self._open:
            return
        ready = {each.name for each in self._registry.ready("thinker")}
        for name, opened in list(self._open.items()):
            if opened.thinker not in ready:
                self._end(name, "failed")

    def counted(self, outcome: Outcome) -> Outcome:
        """Count how a beginning ended."""
        self._metrics.prefills.labels(outcome).inc()
        return outcome

    def _end(self, name: str, outcome: Outcome) -> None:
        opened = self._open.get(name)
        if opened is not None and not opened.done.done():
            opened.done.set_result(outcome)

    def _spend(self, client: str, tokens: int) -> None:
        # An estimate may be returned that a request has forgiven meanwhile.
        self._spent[client] = max(0, self._spent.get(client, 0) + tokens)
        self._spent.move_to_end(client)
        if len(self._spent) > MAX_CLIENTS:
            self._spent.popitem(last=False)
