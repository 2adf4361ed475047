"""The three stages imitated at their sockets: real addresses, real messages, no model."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from tokenizers import Tokenizer

from shared.config import Config
from shared.messages import (
    STAGES,
    Abort,
    AbortDone,
    AudioChunk,
    CodecDelta,
    FinishReason,
    Heartbeat,
    MediaKind,
    PromptUsage,
    RequestFailed,
    StageLimits,
    StageLoad,
    StageName,
    TextDelta,
    ThinkRequest,
)
from shared.payloads import Blob
from shared.wire import Decoder, encode

DEADLINE_S = 10.0
SPEAKERS = ["Ethan", "Chelsie"]
PLACEHOLDERS: dict[str, MediaKind] = {"<|AUDIO|>": "audio", "<|IMAGE|>": "image", "<|VIDEO|>": "video"}
TOKENS_OF_ITEM = 10
"""What each sound, picture or video comes to in the imitated thinker's prompt."""
CACHED = 3


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Wait for something that must happen soon."""
    late = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > late:
            raise AssertionError(f"{what} did not come true in {DEADLINE_S} s")
        await asyncio.sleep(0.005)


def problem_of(request: ThinkRequest, placeholders: dict[int, MediaKind]) -> str | None:
    """What the thinker would find wrong with a request; none if it is as agreed."""
    asked = [placeholders[each] for each in request.prompt_token_ids if each in placeholders]
    given = [item.kind for item in request.media]
    if asked != given:
        return f"{request.request_id}: placeholders of {asked} for {given}"
    if not all(item.data.nbytes for item in request.media):
        return f"{request.request_id}: an empty item"
    return None


def placeholder_ids(checkpoint: str) -> dict[int, MediaKind]:
    tokenizer = Tokenizer.from_file(str(Path(checkpoint) / "tokenizer.json"))
    ids = {tokenizer.token_to_id(token): kind for token, kind in PLACEHOLDERS.items()}
    return {token_id: kind for token_id, kind in ids.items() if token_id is not None}


def usage(request: ThinkRequest) -> PromptUsage:
    length = len(request.prompt_token_ids) + (TOKENS_OF_ITEM - 1) * len(request.media)
    return PromptUsage(tokens=length, cached_tokens=CACHED)


class FakeStages:
    """Records what the gateway asks and checks it, and sends what the test tells it to."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.context = zmq.asyncio.Context()
        self.requests: list[ThinkRequest] = []
        self.aborts: dict[StageName, list[str]] = {stage: [] for stage in STAGES}
        self.confirm = True
        self.pids: dict[StageName, int] = {stage: 100 + index for index, stage in enumerate(STAGES)}
        self.instances: dict[StageName, str] = dict.fromkeys(STAGES, "first")
        self.max_positions = 512
        self.alive: set[StageName] = set(STAGES)
        self.problems: list[str] = []
        self._placeholders = placeholder_ids(config.model or "")
        self._tasks: list[asyncio.Task[None]] = []
        self.events = self.context.socket(zmq.PUSH)
        self.events.connect(config.gateway.events)
        self._inbox = self.context.socket(zmq.PULL)
        self.control: dict[StageName, zmq.asyncio.Socket] = {}

    def listen(self) -> None:
        """The thinker takes requests from now on."""
        self._inbox.bind(self._config.stages.thinker.inbox)
        self._tasks.append(asyncio.create_task(self._take_requests()))

    async def start(self) -> None:
        for stage in STAGES:
            socket = self.context.socket(zmq.DEALER)
            socket.set(zmq.IDENTITY, stage.encode())
            socket.connect(self._config.gateway.control)
            self.control[stage] = socket
            self._tasks.append(asyncio.create_task(self._beat(stage)))
            self._tasks.append(asyncio.create_task(self._take_aborts(stage)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.context.destroy(linger=0)
        assert self.problems == []

    async def request(self, index: int) -> ThinkRequest:
        await until(lambda: len(self.requests) > index, f"request {index}")
        return self.requests[index]

    async def aborted(self, request_id: str) -> None:
        await until(
            lambda: all(request_id in aborts for aborts in self.aborts.values()), f"abort of {request_id}"
        )

    async def send(self, message: object) -> None:
        await self.events.send_multipart(encode(message))

    async def text(self, request_id: str, seq: int, ids: list[int], end: FinishReason | None = None) -> None:
        asked = next((each for each in self.requests if each.request_id == request_id), None)
        prompt = usage(asked) if asked is not None and seq == 0 else None
        await self.send(
            TextDelta(request_id=request_id, seq=seq, token_ids=ids, finish_reason=end, prompt=prompt)
        )

    async def codec(self, request_id: str, seq: int, ids: list[int], end: FinishReason | None = None) -> None:
        await self.send(CodecDelta(request_id=request_id, seq=seq, token_ids=ids, finish_reason=end))

    async def audio(self, request_id: str, seq: int, pcm: bytes, last: bool = False) -> None:
        await self.send(
            AudioChunk(request_id=request_id, seq=seq, samples=len(pcm) // 4, data=Blob(pcm), last=last)
        )

    async def fail(self, request_id: str, stage: StageName, code: str, message: str) -> None:
        await self.send(RequestFailed(request_id=request_id, stage=stage, code=code, message=message))

    async def answer(self, request: ThinkRequest, ids: list[int]) -> None:
        """Answer a request whole, all stages at once as they do."""
        name = request.request_id
        await self.text(name, 0, ids[:1])
        await self.text(name, 1, ids[1:], "stop")
        if request.speech is not None:
            await self.codec(name, 0, [1, 2, 3])
            await self.audio(name, 0, bytes(4 * 240))
            await self.codec(name, 1, [4], "length")
            await self.audio(name, 1, b"\0\0\0\x3f" * 120, last=True)

    def serve(self, ids: list[int]) -> None:
        """Answer every request, from now on."""

        async def loop() -> None:
            answered = 0
            while True:
                for request in self.requests[answered:]:
                    await self.answer(request, ids)
                    answered += 1
                await asyncio.sleep(0.005)

        self._tasks.append(asyncio.create_task(loop()))

    def heartbeat(self, stage: StageName) -> Heartbeat:
        speakers = SPEAKERS if stage == "token2wav" else []
        return Heartbeat(
            stage=stage,
            pid=self.pids[stage],
            instance=self.instances[stage],
            limits=StageLimits(max_positions=self.max_positions, speakers=speakers),
            load=StageLoad(running=1),
            peak_memory_bytes=2**20,
        )

    async def _beat(self, stage: StageName) -> None:
        while True:
            if stage in self.alive:
                await self.control[stage].send_multipart(encode(self.heartbeat(stage)))
            await asyncio.sleep(0.03)

    async def _take_requests(self) -> None:
        decoder: Decoder[ThinkRequest] = Decoder(ThinkRequest)
        while True:
            request = decoder.decode(await self._inbox.recv_multipart())
            problem = problem_of(request, self._placeholders)
            self.problems += [problem] if problem else []
            self.requests.append(request)

    async def _take_aborts(self, stage: StageName) -> None:
        decoder: Decoder[Abort] = Decoder(Abort)
        while True:
            abort = decoder.decode(await self.control[stage].recv_multipart())
            self.aborts[stage].append(abort.request_id)
            if self.confirm:
                done = AbortDone(request_id=abort.request_id, stage=stage)
                await self.control[stage].send_multipart(encode(done))
