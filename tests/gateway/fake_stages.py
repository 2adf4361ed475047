"""The three stages imitated at their sockets: real addresses, real messages, no model."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from tokenizers import Tokenizer

from omnirelay.status import CodecDefaults, CodecLimits
from shared.config import Config
from shared.families import QWEN2_5_OMNI
from shared.messages import (
    STAGES,
    Abort,
    AbortDone,
    AudioChunk,
    Closing,
    CodecDelta,
    ControlToStage,
    Credit,
    Farewell,
    FinishReason,
    Heartbeat,
    Mark,
    MediaKind,
    Peers,
    PromptUsage,
    RequestFailed,
    StageLimits,
    StageLoad,
    StageName,
    TextDelta,
    ThinkerInput,
    ThinkRequest,
    control_identity,
)
from shared.messages.payloads import Blob
from shared.transport.wire import Decoder, encode

DEADLINE_S = 60.0
SPEAKERS = ["Ethan", "Chelsie"]
CODEC = CodecLimits(defaults=CodecDefaults(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05))
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
    ids = {tokenizer.token_to_id(token): kind for token, kind in QWEN2_5_OMNI.placeholders.items()}
    return {token_id: kind for token_id, kind in ids.items() if token_id is not None}


def usage(request: ThinkRequest) -> PromptUsage:
    length = len(request.prompt_token_ids) + (TOKENS_OF_ITEM - 1) * len(request.media)
    return PromptUsage(tokens=length, cached_tokens=CACHED)


class FakeReplica:
    """One process of a stage, as the gateway hears it.

    Attributes:
        silent: It sends no heartbeats, and hears nothing.
        draining: It says that it ends soon.
        gateway: The gateway that it has joined.
        peers: The replicas of the next stage that it was told of.
        released: It was told that nothing needs it.
        aborts: The requests that it was told to drop.
        alone: The request that it computes alone, and what the gateway has confirmed of that.
        breaks: How often its connections have ended.
    """

    def __init__(self, stages: "FakeStages", stage: StageName, name: str, inbox: str) -> None:
        self.stage: StageName = stage
        self.name = name
        self.inbox = inbox
        self.silent = False
        self.draining = False
        self.deaf_to_peers = False
        self.gateway: str | None = None
        self.peers: dict[str, str] = {}
        self.released = False
        self.aborts: list[str] = []
        self.alone: str | None = None
        self.confirmed: str | None = None
        self.breaks: dict[str, int] = {}
        self.load = StageLoad(running=1)
        self.busy_s = 0.0
        self._stages = stages
        self.control = stages.context.socket(zmq.DEALER)
        self.control.set(zmq.IDENTITY, control_identity(stage, name).encode())
        self.control.connect(stages.config.gateway.control)
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._hear())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.control.close(0)

    async def leave(self) -> None:
        """End as a stage does that was told to."""
        self.silent = True
        await self.control.send_multipart(encode(Farewell(stage=self.stage, instance=self.name)))

    def heartbeat(self) -> Heartbeat:
        stages = self._stages
        return Heartbeat(
            stage=self.stage,
            pid=stages.pids[self.stage],
            instance=self.name,
            inbox=self.inbox,
            limits=StageLimits(
                max_positions=stages.max_positions,
                speakers=SPEAKERS if self.stage == "token2wav" else [],
                codec=CODEC if self.stage == "talker" else None,
                prefills=stages.max_prefills if self.stage == "thinker" else 0,
                batch=16,
            ),
            load=self.load,
            peak_memory_bytes=2**20,
            busy_s=self.busy_s,
            gateway=self.gateway,
            peers=list(self.peers),
            draining=self.draining,
            breaks=self.breaks,
            alone=self.alone,
        )

    async def _beat(self) -> None:
        while True:
            if not self.silent and self.stage in self._stages.alive:
                await self.control.send_multipart(encode(self.heartbeat()))
            joined = self.gateway is not None and (self.peers or self.stage == STAGES[-1])
            # Every test waits for this.
            await asyncio.sleep(0.03 if joined else 0.005)

    async def _hear(self) -> None:
        decoder: Decoder[ControlToStage] = Decoder(ControlToStage)
        while True:
            message = decoder.decode(await self.control.recv_multipart())
            while self.silent:
                await asyncio.sleep(0.005)
            if isinstance(message, Peers):
                self.gateway = message.gateway
                self.released, self.confirmed = message.released, message.alone
                known = self.peers if message.replicas is None else message.replicas
                self.peers = {} if self.deaf_to_peers else known
            elif isinstance(message, Closing):
                self.gateway = None
            elif isinstance(message, Abort):
                await self._take_abort(message.request_id)

    async def compute_alone(self, request_id: str | None) -> None:
        """Name the request that is computed alone, and wait for the gateway's confirmation."""
        self.alone = request_id
        await until(lambda: self.confirmed == request_id, f"the confirmation of {request_id}")

    async def _take_abort(self, request_id: str) -> None:
        self.aborts.append(request_id)
        self._stages.aborts[self.stage].append(request_id)
        if self._stages.confirm:
            done = AbortDone(request_id=request_id, stage=self.stage, instance=self.name)
            await self.control.send_multipart(encode(done))


class FakeStages:
    """Records what the gateway asks and checks it, and sends what the test tells it to.

    Attributes:
        generous: The thinker gives credit.
        ends: What ends with them.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.context = zmq.asyncio.Context()
        self.requests: list[ThinkRequest] = []
        self.prefills: list[ThinkRequest] = []
        self.aborts: dict[StageName, list[str]] = {stage: [] for stage in STAGES}
        self.confirm = True
        self.generous = True
        self.pids: dict[StageName, int] = {stage: 100 + index for index, stage in enumerate(STAGES)}
        self.max_positions = 512
        self.max_prefills = 0
        self.alive: set[StageName] = set(STAGES)
        self.problems: list[str] = []
        self.replicas: list[FakeReplica] = []
        self.ends = AsyncExitStack()
        self._placeholders = placeholder_ids(config.model or "")
        self._tasks: list[asyncio.Task[None]] = []
        self.events = self.context.socket(zmq.PUSH)
        self.events.connect(config.gateway.events)

    @property
    def control(self) -> dict[StageName, zmq.asyncio.Socket]:
        """The first replicas' control sockets."""
        return {stage: self.replica(stage).control for stage in STAGES}

    def listen(self, inbox: str | None = None) -> zmq.asyncio.Socket:
        """A thinker takes requests from now on, by the socket that is returned."""
        socket = self.context.socket(zmq.PULL)
        try:
            socket.bind(inbox or self.config.stages.thinker.inbox)
        except zmq.ZMQError:
            socket.close(0)
            raise
        self.inbox = socket
        self.listen_again()
        return socket

    async def stop_listening(self) -> None:
        """The thinker stays connected, and takes no requests: the window and then the queue to it fill."""
        task = self._tasks.pop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def listen_again(self) -> None:
        """After :meth:`stop_listening`."""
        self._tasks.append(asyncio.create_task(self._take_requests(self.inbox)))

    async def start(self) -> None:
        for stage in STAGES:
            self.add(stage, "first", self.config.stage(stage).inbox)

    def add(self, stage: StageName, name: str, inbox: str) -> FakeReplica:
        """One more replica; if another listens there, it has taken its place."""
        replica = FakeReplica(self, stage, name, inbox)
        self.replicas.append(replica)
        return replica

    def replica(self, stage: StageName, name: str = "first") -> FakeReplica:
        return next(each for each in self.replicas if (each.stage, each.name) == (stage, name))

    def restart(self, stage: StageName, name: str = "second") -> FakeReplica:
        """Another process takes the place of a stage's first."""
        before = self.replica(stage)
        before.silent = True
        return self.add(stage, name, before.inbox)

    async def stop(self) -> None:
        await self.ends.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            await replica.stop()
        self.context.destroy(linger=0)
        assert self.problems == []

    async def request(self, index: int) -> ThinkRequest:
        await until(lambda: len(self.requests) > index, f"request {index}")
        return self.requests[index]

    async def aborted(self, request_id: str) -> None:
        """Wait until all stages that serve a request were told to drop it."""
        route = next(each.route for each in self.requests if each.request_id == request_id)
        await self.aborted_at(request_id, *(each for each in STAGES if route and route.replica(each)))

    async def aborted_at(self, request_id: str, *stages: StageName) -> None:
        await until(
            lambda: all(request_id in self.aborts[stage] for stage in stages), f"abort of {request_id}"
        )

    async def prefill(self, index: int) -> ThinkRequest:
        await until(lambda: len(self.prefills) > index, f"beginning {index}")
        return self.prefills[index]

    async def prefilled(self, name: str, tokens: int, cached: int = 0) -> None:
        usage = PromptUsage(tokens=tokens, cached_tokens=cached)
        await self.send(TextDelta(request_id=name, seq=0, token_ids=[], finish_reason="length", prompt=usage))

    async def send(self, message: object) -> None:
        await self.events.send_multipart(encode(message))

    async def text(self, name: str, seq: int, ids: list[int], end: FinishReason | None = None) -> None:
        asked = next((each for each in self.requests if each.request_id == name), None)
        prompt = usage(asked) if asked is not None and seq == 0 else None
        await self.send(TextDelta(request_id=name, seq=seq, token_ids=ids, finish_reason=end, prompt=prompt))

    async def codec(
        self, name: str, seq: int, ids: list[int], end: FinishReason | None = None, conditioned: bool = False
    ) -> None:
        await self.send(
            CodecDelta(request_id=name, seq=seq, token_ids=ids, finish_reason=end, conditioned=conditioned)
        )

    async def audio(self, name: str, seq: int, pcm: bytes, last: bool = False) -> None:
        samples = len(pcm) // 4
        await self.send(AudioChunk(request_id=name, seq=seq, samples=samples, data=Blob(pcm), last=last))

    async def fail(self, request_id: str, stage: StageName, code: str, message: str) -> None:
        await self.send(RequestFailed(request_id=request_id, stage=stage, code=code, message=message))

    async def answer(self, request: ThinkRequest, ids: list[int]) -> None:
        """Answer a request whole, all stages at once as they do."""
        name = request.request_id
        if request.resume is None or request.resume.finish_reason is None:
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
        return self.replica(stage).heartbeat()

    async def _take_requests(self, socket: zmq.asyncio.Socket) -> None:
        decoder: Decoder[ThinkerInput | Mark] = Decoder(ThinkerInput | Mark)
        while True:
            request = decoder.decode(await socket.recv_multipart())
            if isinstance(request, Mark):
                if not self.generous:
                    continue
                credit = Credit(sender=request.sender, channel=request.channel, position=request.position)
                await self.control["thinker"].send_multipart(encode(credit))
                continue
            if request.early is not None:
                self.prefills.append(request)
                continue
            problem = problem_of(request, self._placeholders)
            self.problems += [problem] if problem else []
            self.requests.append(request)
