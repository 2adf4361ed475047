"""Turns clients' requests into the thinker's: validated, their prompts built, their media loaded."""

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.dispatch.prefills import MAX_BYTES
from gateway.fairness.quota import Hold
from gateway.fairness.thread import FairThread
from gateway.input.media import MediaIntake
from gateway.input.prompt import PromptBuilder
from gateway.input.urls import HttpsUrl
from gateway.requests.record import check_partial
from gateway.validation import SEED_BITS, Validator
from omnirelay.content import media_of
from omnirelay.errors import BusyError
from omnirelay.protocol import GenerateRequest, PartialAnswer
from omnirelay.status import CodecLimits
from shared.config import MediaConfig
from shared.messages import TextSampling, ThinkRequest

if TYPE_CHECKING:
    from gateway.input.fetch import Fetcher

RETRY_WITH_REQUEST_MS: Final = 1000


@dataclass(eq=False)
class RequestIntake:
    """Builds prompts on a thread of its own, and loads media; ``_name`` is the prefix of request ids."""

    _name: str
    _validator: Validator
    _prompts: PromptBuilder
    _config: MediaConfig
    _fetch: "Fetcher | None"
    _thread: FairThread = field(default_factory=lambda: FairThread("prompts"))

    def __post_init__(self) -> None:
        self._media = MediaIntake(self._config, self._fetch, self._thread.run)

    async def request(
        self,
        request: GenerateRequest,
        speaker: str | None,
        hold: Hold,
        traceparent: str | None,
        cache_salt: str | None,
    ) -> ThinkRequest:
        """Build the thinker's request, validated before media are fetched; RequestError if it is invalid."""
        items = self._media.check(media_of(request.messages), hold)
        prompt = await self._thread.run(hold.client, self._validator.prompt, request)
        drawn_seed = secrets.randbits(SEED_BITS)
        think = self._validator.think_request(self._new_id(), request, prompt, speaker, drawn_seed)
        media = await self._media.load(items, hold)
        return msgspec.structs.replace(think, media=media, traceparent=traceparent, cache_salt=cache_salt)

    async def beginning(
        self, request: GenerateRequest, hold: Hold, goes_on: bool, cache_salt: str | None
    ) -> ThinkRequest:
        """Build the beginning of a prompt; RequestError if it is invalid, too large, or has media by URL.

        Args:
            goes_on: The last item is a recording that goes on.
        """
        items = self._media.check(media_of(request.messages), hold)
        if any(isinstance(item.source, HttpsUrl) for item in items):
            raise BusyError("media by URL are fetched with the request", RETRY_WITH_REQUEST_MS)
        if hold.size > MAX_BYTES:
            problem = f"{hold.size} bytes of media are sent with the request only"
            raise BusyError(problem, RETRY_WITH_REQUEST_MS)
        prompt: list[int] = await self._thread.run(hold.client, self._validator.prompt, request)
        if goes_on:
            while prompt and prompt[-1] not in self._prompts.placeholders:
                prompt.pop()
        media = await self._media.load(items, hold)
        return ThinkRequest(
            request_id=self._new_id(),
            prompt_token_ids=prompt,
            sampling=TextSampling(max_tokens=1),
            seed=0,
            media=media,
            use_audio_in_video=request.use_audio_in_video,
            early="recording" if goes_on else "prompt",
            cache_salt=cache_salt,
        )

    async def given(
        self, request: GenerateRequest, think: ThinkRequest, client: str, codec: CodecLimits
    ) -> PartialAnswer | None:
        """What there is of the answer, checked: what the client holds, and the text that it is to have."""
        partial = request.resume
        if request.say is not None:
            held = partial or PartialAnswer(request_id=think.request_id)
            ids = await self._thread.run(client, self._validator.said, request, think.sampling.max_tokens)
            partial = msgspec.structs.replace(held, text_token_ids=ids, text_finish_reason="stop")
        if partial is not None:
            check_partial(partial, think, codec, self._prompts.vocab_size, self._prompts.placeholders)
        return partial

    async def tokenize(self, request: GenerateRequest, client: str) -> list[int]:
        """Build a prompt alone."""
        ids: list[int] = await self._thread.run(client, self._validator.prompt, request)
        return ids

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _new_id(self) -> str:
        return f"{self._name}{secrets.token_hex(8)}"
