"""The conversation of a session, computed by the thinker while the user speaks."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from gateway.access.account import ClientAccount
from gateway.http.realtime.items import BYTES_PER_S
from gateway.manager import Gateway
from omnirelay.protocol import GenerateRequest

AHEAD_BYTES: Final = BYTES_PER_S * 15 // 100
"""What the thinker needs of the audio behind a window."""
LOOK_BYTES: Final = BYTES_PER_S
"""Audio between two transcripts of a recording that goes on."""
PARTS: Final = 16
"""A recording is sent again when it has grown by a part of it, so that all together are few times as long."""
PAUSE_S: Final = 0.1
"""A request that follows within this time needs nothing computed before it."""
Look = Callable[[GenerateRequest, str], Coroutine[Any, Any, None]]
"""Processes a request that may come, on a thinker."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class EarlyPrompt:
    """At most one beginning at a time.

    Attributes:
        thinker: The one that computed the last beginning.
        _client: Whose allowance of tokens is used.
        _failed: A beginning has failed: it might end an engine, so no other follows in this session.
    """

    _gateway: Gateway
    _account: ClientAccount
    _client: str
    thinker: str | None = None
    _work: asyncio.Task[None] | None = None
    _sent_bytes: int = 0
    _failed: bool = False

    def heard(
        self, size: int, prompt: Callable[[], Awaitable[GenerateRequest]], look: Look | None = None
    ) -> None:
        """Audio was appended: have what is sure of the prompt computed, once another window is complete.

        A look does not wait for a window: encoding an incomplete one again is cheap, and words come sooner.

        Args:
            size: Bytes in the input audio buffer.
            prompt: Makes the request as it would be now.
            look: Processes it there instead, until :meth:`stop`.
        """
        step = LOOK_BYTES if look else round(self._gateway.prompts.family.audio_window_s * BYTES_PER_S)
        steps = (size - AHEAD_BYTES) // step
        sent = self._sent_bytes // step
        busy = self._work is not None and not self._work.done()
        if steps < sent + 1 + sent // PARTS or busy:
            return
        self._sent_bytes = steps * step
        thinker = self._room()
        if thinker is not None:
            self._work = asyncio.create_task(self._compute_so_far(prompt, thinker, look))

    def added(self, prompt: Callable[[], GenerateRequest]) -> None:
        """An item was added: have the whole prompt computed, unless a request follows at once."""
        self.stop()
        self._work = asyncio.create_task(self._compute_after_pause(prompt))

    def renew(self) -> None:
        """A request was taken: as much may be computed early as before."""
        self._gateway.prefills.renew(self._client)

    def stop(self) -> None:
        """Compute nothing more of the recording so far."""
        self._sent_bytes = 0
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def _room(self) -> str | None:
        return None if self._failed else self._gateway.prefills.thinker_for(self._client, self.thinker)

    async def _compute_so_far(
        self, prompt: Callable[[], Awaitable[GenerateRequest]], thinker: str, look: Look | None
    ) -> None:
        request = await prompt()
        await (look(request, thinker) if look else self._compute(request, thinker, goes_on=True))

    async def _compute_after_pause(self, prompt: Callable[[], GenerateRequest]) -> None:
        await asyncio.sleep(PAUSE_S)
        thinker = self._room()
        if thinker is not None:
            await self._compute(prompt(), thinker, goes_on=False)

    async def _compute(self, request: GenerateRequest, thinker: str, goes_on: bool) -> None:
        gateway = self._gateway
        outcome = await gateway.compute_early(request, self._account, self._client, thinker, goes_on)
        if outcome == "computed":
            self.thinker = thinker
        elif outcome == "failed":
            log.info("nothing more is computed early for %s", self._account.name)
            self._failed = True
