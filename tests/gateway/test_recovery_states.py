"""Any order of losses, returns, late messages and cancels: each request ends once, and without a seam."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.access.account import ClientAccount, Principal, Unread
from gateway.input.prompt import PromptBuilder
from gateway.manager import Gateway
from gateway.requests.lifecycle import RequestState
from gateway.requests.response_stream import ResponseStream
from omnirelay.errors import BusyError, StageUnavailableError
from omnirelay.events import AcceptedEvent, AudioEvent, DoneEvent, ErrorEvent, Event, TextEvent
from omnirelay.protocol import GenerateRequest
from shared.messages import (
    STAGES,
    Abort,
    AbortDone,
    AudioChunk,
    CodecDelta,
    ControlToStage,
    Farewell,
    Heartbeat,
    Peers,
    RequestFailed,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    TextDelta,
    ThinkerInput,
    ThinkRequest,
)
from shared.messages.payloads import Blob
from tests.gateway.bench import make_config
from tests.gateway.checkpoint_dir import make_checkpoint_dir

T = TypeVar("T")
TEXT = "one two three four"
CODES = [7, 8, 9, 10]
CHUNKS = 3
STREAMS = ("text", "codec", "audio")
picks = st.integers(0, 10_000)


@cache
def make_prompts() -> PromptBuilder:
    """For all examples: a fixture's directory cannot be reached from a state machine."""
    with tempfile.TemporaryDirectory() as directory:
        return PromptBuilder(make_checkpoint_dir(Path(directory) / "checkpoint"))


@dataclass
class Try:
    """An attempt as the stages see it: what they have sent of each stream, new or known from before."""

    request: ThinkRequest
    at: dict[str, int] = field(default_factory=dict)
    seqs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))

    def __post_init__(self) -> None:
        resume = self.request.resume
        speech = resume.speech if resume is not None else None
        self.at = {
            "text": len(resume.text_token_ids) if resume is not None else 0,
            "codec": len(speech.codec_token_ids) if speech is not None else 0,
            "audio": len(speech.chunk_samples) if speech is not None else 0,
        }

    @property
    def owner(self) -> str:
        return self.request.request_id.partition(".")[0]


@dataclass
class Client:
    """What a client has got."""

    stream: ResponseStream
    speech: bool
    text: list[int] = field(default_factory=list)
    chunks: int = 0
    ends: list[Event] = field(default_factory=list)


class Recovery(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.loop = asyncio.new_event_loop()
        prompts = make_prompts()
        config = make_config(
            prompts.directory, {"resume_attempts": 2, "resume_wait_s": 5.0}, max_active=2, max_queued=3
        )
        stages: Any = self
        self.gateway = Gateway(config, prompts, stages, clock=lambda: self.now)
        self.ids = prompts._tokenizer.encode(TEXT).ids
        self.account = ClientAccount("a", 100, 2**20, Principal("a"), Unread(2**20))
        self.told: dict[tuple[StageName, str], Peers] = {}
        self.peers: dict[tuple[StageName, str], list[str]] = {}
        self.inboxes: dict[tuple[StageName, str], str] = {}
        self.silent: set[tuple[StageName, str]] = set()
        self.draining: set[tuple[StageName, str]] = set()
        self.tries: list[Try] = []
        self.aborted: set[tuple[StageName, str, str]] = set()
        self.clients: dict[str, Client] = {}
        # A stage that is full of other requests costs no attempt.
        self.free_attempts: Counter[str] = Counter()
        self.names = 0

    # What the gateway asks of the stages.

    def think(self, request: ThinkerInput) -> None:
        assert isinstance(request, ThinkRequest)
        assert all(each.request.request_id != request.request_id for each in self.tries), "an id comes twice"
        self.tries.append(Try(request))

    def tell(self, stage: StageName, replica: str, message: ControlToStage) -> None:
        if isinstance(message, Abort):
            self.aborted.add((stage, replica, message.request_id))
        elif isinstance(message, Peers):
            self.told[stage, replica] = message
            if message.replicas is not None:
                self.peers[stage, replica] = list(message.replicas)

    def reach(self, thinkers: dict[str, str]) -> Set[str]:
        return thinkers.keys()

    def breaks(self) -> dict[str, int]:
        return {}

    # What happens.

    def do(self, what: Callable[[], T]) -> T:
        """Run something on the loop, and what it leaves to be run soon."""

        async def inside() -> T:
            value = what()
            for _ in range(3):
                await asyncio.sleep(0)
            return value

        return self.loop.run_until_complete(inside())

    def add(self, stage: StageName, inbox: str | None = None) -> None:
        self.names += 1
        name = f"r{self.names}"
        self.inboxes[stage, name] = inbox or f"ipc://{name}"

    def beat(self, stage: StageName, name: str) -> None:
        peers = self.told.get((stage, name))
        heartbeat = Heartbeat(
            stage=stage,
            pid=1,
            instance=name,
            inbox=self.inboxes[stage, name],
            limits=StageLimits(),
            load=StageLoad(),
            gateway=peers.gateway if peers is not None else None,
            peers=self.peers.get((stage, name), []),
            draining=(stage, name) in self.draining,
        )
        self.do(lambda: self.gateway.monitor.on_control(heartbeat))

    @initialize(sent=st.lists(st.integers(0, 3), min_size=3, max_size=3))
    def begin(self, sent: list[int]) -> None:
        """A request is under way at the only replicas."""
        for stage in STAGES:
            self.add(stage)
        self.all_beat()
        self.all_beat()
        self.submit(speech=True, priority=0)
        for stream, count in zip(STREAMS, sent, strict=True):
            self.a_stage_sends(1, stream, count)

    @rule(speech=st.booleans(), priority=st.integers(-1, 1))
    def submit(self, speech: bool, priority: int) -> None:
        request = GenerateRequest(prompt_token_ids=[1], speech=speech, priority=priority)
        try:
            stream = self.loop.run_until_complete(self.gateway.submit(request, self.account))
        except (BusyError, StageUnavailableError):
            return
        self.clients[stream.request_id] = Client(stream, speech)

    def all_beat(self) -> None:
        # Twice: to hear who is there, and to say so.
        for _ in range(2):
            for stage, name in list(self.inboxes):
                if (stage, name) not in self.silent:
                    self.beat(stage, name)
        self.tick()

    @rule(steps=st.integers(1, 8))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.5
            self.all_beat()

    def tick(self) -> None:
        self.do(self.gateway.start_waiting)
        self.do(self.gateway.check_stages)

    @precondition(lambda self: len(self.inboxes) < 8)
    @rule(stage=st.sampled_from(STAGES))
    def one_more(self, stage: StageName) -> None:
        self.add(stage)

    @precondition(lambda self: self.inboxes)
    @rule(pick=picks, what=st.sampled_from(["freeze", "thaw", "restart", "leave", "drain", "die", "forget"]))
    def trouble(self, pick: int, what: str) -> None:
        replica = stage, name = list(self.inboxes)[pick % len(self.inboxes)]
        if what == "freeze":
            self.silent.add(replica)
        elif what == "thaw":
            self.silent.discard(replica)
        elif what == "drain":
            self.draining.add(replica)
        elif what == "forget":
            # As if it had heard nothing of the gateway for long.
            self.told.pop(replica, None)
        else:
            inbox = self.inboxes.pop(replica)
            if what == "restart":
                self.add(stage, inbox)
            elif what == "leave":
                self.do(lambda: self.gateway.monitor.on_control(Farewell(stage=stage, instance=name)))

    @precondition(lambda self: self.tries)
    @rule(pick=picks, stream=st.sampled_from(STREAMS), count=st.integers(1, 5))
    def a_stage_sends(self, pick: int, stream: str, count: int) -> None:
        """Of any attempt, the present one or a lost one."""
        one = self.one_of(pick)
        for _ in range(count):
            message = self.message(one, stream)
            if message is not None:
                self.send(one, stream, message)

    def send(self, one: Try, stream: str, message: StageEvent) -> None:
        one.at[stream] += 1
        one.seqs[stream] += 1
        name = message.request_id
        present = self.gateway.dispatcher.of(name) is not None
        self.do(lambda: self.gateway.on_event(message))
        if present and self.gateway.dispatcher.of(name) is None:
            report = self.gateway.report(one.owner)
            assert report is not None
            assert report.state == RequestState.COMPLETED, "a message in its place costs no attempt"

    @precondition(lambda self: self.tries)
    @rule(pick=picks, stream=st.sampled_from(STREAMS), off=st.integers(-2, 2))
    def a_message_is_out_of_place(self, pick: int, stream: str, off: int) -> None:
        one = self.one_of(pick)
        message = self.message(one, stream)
        if message is not None and not isinstance(message, RequestFailed) and off and message.seq + off >= 0:
            wrong = msgspec.structs.replace(message, seq=message.seq + off)
            self.do(lambda: self.gateway.on_event(wrong))

    @precondition(lambda self: self.tries)
    @rule(
        pick=picks,
        stage=st.sampled_from(STAGES),
        code=st.sampled_from(["stage_failed", "busy", "prompt_too_long"]),
    )
    def a_stage_fails_it(self, pick: int, stage: StageName, code: str) -> None:
        one = self.one_of(pick)
        failed = RequestFailed(request_id=one.request.request_id, stage=stage, code=code, message="no")
        if code == "busy" and self.gateway.dispatcher.of(failed.request_id) is not None:
            self.free_attempts[one.owner] += 1
        self.do(lambda: self.gateway.on_event(failed))

    @precondition(lambda self: self.aborted)
    @rule(pick=picks)
    def an_abort_is_confirmed(self, pick: int) -> None:
        stage, name, request_id = sorted(self.aborted)[pick % len(self.aborted)]
        done = AbortDone(request_id=request_id, stage=stage, instance=name)
        self.do(lambda: self.gateway.monitor.on_control(done))

    @precondition(lambda self: self.clients)
    @rule(pick=picks, late=st.booleans())
    def a_request_is_given_up(self, pick: int, late: bool) -> None:
        name = list(self.clients)[pick % len(self.clients)]
        self.do(lambda: self.gateway._expire(name, 1.0) if late else self.gateway.cancel(name))

    @precondition(lambda self: len(self.clients) > 2 and not self.gateway.stopping)
    @rule()
    def the_gateway_is_told_to_stop(self) -> None:
        self.do(lambda: self.gateway.drain(10.0))

    def one_of(self, pick: int) -> Try:
        """An attempt: mostly a present one, if there is any."""
        present = [one for one in self.tries if self.gateway.dispatcher.of(one.request.request_id)]
        among = present if present and pick % 4 else self.tries
        return among[pick // 4 % len(among)]

    def message(self, one: Try, stream: str) -> StageEvent | None:
        """The next message of a stream; none where it has ended, or was not asked for."""
        request, at, seq = one.request, one.at[stream], one.seqs[stream]
        size = {"text": len(self.ids), "codec": len(CODES), "audio": CHUNKS}[stream]
        if at >= size or (stream != "text" and request.speech is None):
            return None
        name, ends = request.request_id, at == size - 1
        reason: Any = "stop" if ends else None
        if stream == "text":
            return TextDelta(request_id=name, seq=seq, token_ids=[self.ids[at]], finish_reason=reason)
        if stream == "codec":
            return CodecDelta(request_id=name, seq=seq, token_ids=[CODES[at]], finish_reason=reason)
        return AudioChunk(request_id=name, seq=seq, samples=1, data=Blob(bytes([at, 0, 0, 0])), last=ends)

    # What must hold.

    @invariant()
    def answers_have_no_seam(self) -> None:
        for client in self.clients.values():
            while client.stream._events:
                self.take(client, self.loop.run_until_complete(anext(client.stream)))

    def take(self, client: Client, event: Event) -> None:
        assert not client.ends, "nothing comes after the end"
        if isinstance(event, TextEvent):
            client.text += event.token_ids
            assert client.text == self.ids[: len(client.text)]
        elif isinstance(event, AudioEvent):
            assert (event.seq, event.pcm[0]) == (client.chunks, client.chunks)
            client.chunks += 1
        elif isinstance(event, DoneEvent):
            assert event.text_token_ids == client.text == self.ids
            assert event.codec_token_ids == (CODES if client.speech else [])
            assert client.chunks == (CHUNKS if client.speech else 0)
            client.ends.append(event)
        elif isinstance(event, ErrorEvent):
            client.ends.append(event)
        else:
            assert isinstance(event, AcceptedEvent)

    @invariant()
    def what_is_over_has_been_aborted(self) -> None:
        last = {one.owner: one for one in self.tries}
        for one in self.tries:
            report = self.gateway.report(one.owner)
            completed = report is not None and report.state == RequestState.COMPLETED
            present = self.gateway.dispatcher.of(one.request.request_id) is not None
            if present:
                assert last[one.owner] is one
                assert not self.clients[one.owner].ends
            elif not (completed and last[one.owner] is one):
                route = one.request.route
                assert route is not None
                for stage in STAGES:
                    replica = route.replica(stage)
                    assert replica is None or (stage, replica, one.request.request_id) in self.aborted

    @invariant()
    def attempts_are_limited(self) -> None:
        for name in self.clients:
            assert sum(one.owner == name for one in self.tries) <= 3 + self.free_attempts[name]

    @invariant()
    def everything_is_counted_once(self) -> None:
        counts = self.gateway.counts.report()
        active_requests = sum(
            counts[state] for state in ("received", "queued", "thinking", "talking", "synthesizing")
        )
        assert active_requests == sum(not client.ends for client in self.clients.values())
        assert self.account.open_requests == len(self.clients)

    def teardown(self) -> None:
        self.all_is_well()
        self.do(self.gateway.close)
        self.answers_have_no_seam()
        assert all(len(client.ends) == 1 for client in self.clients.values())
        self.what_is_over_has_been_aborted()
        self.loop.close()

    def all_is_well(self) -> None:
        """Whatever was before, with all stages there every request comes to an end of its own."""
        self.silent.clear()
        self.draining.clear()
        for stage in STAGES:
            self.add(stage)
        for _ in range(20):
            self.time_passes(2)
            for one in [one for one in self.tries if self.gateway.dispatcher.of(one.request.request_id)]:
                for stream in STREAMS:
                    while (message := self.message(one, stream)) is not None:
                        self.send(one, stream, message)
        self.answers_have_no_seam()
        assert all(client.ends for client in self.clients.values())


TestRecovery = Recovery.TestCase
TestRecovery.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
