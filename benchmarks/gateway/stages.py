"""All three stages in one process, without a model: ``python -m benchmarks.gateway.stages --help``.

They speak the real messages at the real sockets, and answer each request at the pace of speech until it is
aborted.  At SIGTERM the process writes when it sent each text and each chunk of audio.
"""

import argparse
import gc
import heapq
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Final, Literal

import msgspec
from tokenizers import Tokenizer

from omnirelay.values import SAMPLE_RATE
from shared.config import Config, load_config
from shared.messages import (
    HEARTBEAT_SUFFIX,
    STAGES,
    Abort,
    AbortDone,
    AudioChunk,
    CodecDelta,
    ControlToStage,
    Credit,
    Heartbeat,
    Peers,
    PromptUsage,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    TextDelta,
    ThinkRequest,
    control_identity,
)
from shared.messages.payloads import Blob
from shared.real_time import set_realtime_priority
from shared.transport.control import ControlClient
from shared.transport.curve import StackContext, open_context
from shared.transport.queues import PullQueue, PushQueue, Sending

Kind = Literal["text", "codec", "audio"]

TEXT_S: Final = 0.25
"""Seconds of speech of a text token: English is spoken at about four tokens a second."""
CODES: Final = 12
"""Codec tokens of a message: those of a block."""
CODES_S: Final = CODES / 50
BLOCKS: Final = (1, 2, 4, 8)
"""Blocks of the first chunks of audio; the rest are as long as the last."""
BLOCK_SAMPLES: Final = round(CODES_S * SAMPLE_RATE)


def chunk_samples(number: int) -> int:
    """Samples of a chunk of audio, by its number from 0."""
    return BLOCK_SAMPLES * BLOCKS[min(number, len(BLOCKS) - 1)]


def events() -> Iterator[tuple[float, Kind]]:
    """Seconds from the stream's begin, and kind, of each event in order; without end.

    A chunk of audio comes when those before it have been heard.
    """
    due: list[tuple[float, Kind]] = [(0.0, "text"), (0.0, "codec"), (0.0, "audio")]
    chunk = 0
    while True:
        at, kind = due[0]
        yield at, kind
        if kind == "audio":
            after = chunk_samples(chunk) / SAMPLE_RATE
            chunk += 1
        else:
            after = TEXT_S if kind == "text" else CODES_S
        heapq.heapreplace(due, (at + after, kind))


REPLICAS_OF_A_CONTEXT: Final = 64
"""A context of ZeroMQ has at most 1023 sockets, and each replica several."""
CONTROL_S: Final = 0.02
"""How often control sockets are read."""
SPREAD_S: Final = 2.0
"""Streams begin within that time of their request, so that they do not send in step."""
Sent = dict[str, dict[str, list[float]]]
"""By request and kind, the monotonic times."""
Queues = dict[Kind, PushQueue[StageEvent]]


class SimulatedReplica:
    """One process of a stage, as the gateway sees it.

    Args:
        context: The stage's ZeroMQ context.
        config: The stack's.
        stage: Which stage.
        number: Distinguishes the replicas of a stage.
        inbox: Where it says that it listens; a thinker does.
    """

    def __init__(
        self, context: StackContext, config: Config, stage: StageName, number: int, inbox: str
    ) -> None:
        self.stage: Final[StageName] = stage
        self.name: Final = f"simulated{number}"
        identity = control_identity(stage, self.name)
        control = config.gateway.control
        self._control = ControlClient(context, control, identity)
        self._heartbeats = ControlClient(context, control, f"{identity}{HEARTBEAT_SUFFIX}")
        self.events: Final[PushQueue[StageEvent]] = PushQueue(
            context, config.gateway.events, Sending(identity), "gateway"
        )
        self.inbox: Final[PullQueue[ThinkRequest] | None] = (
            PullQueue(context, inbox, ThinkRequest) if stage == "thinker" else None
        )
        self._inbox_address = self.inbox.endpoint if self.inbox is not None else inbox
        self._joined = Peers(gateway="none")
        # None while the gateway knows them.
        self._peers: list[str] | None = []
        self._interval_s = config.stage(stage).heartbeat_s
        self._due = time.monotonic() + random.random() * self._interval_s

    def keep_alive(self, now: float) -> None:
        """Send the heartbeat if it is time."""
        if now < self._due:
            return
        self._due = max(now, self._due + max(self._interval_s, self._joined.heartbeat_s))
        speakers = ["Chelsie"] if self.stage == "token2wav" else []
        beat = Heartbeat(
            stage=self.stage,
            pid=os.getpid(),
            instance=self.name,
            inbox=self._inbox_address,
            limits=StageLimits(max_positions=32_768, speakers=speakers),
            load=StageLoad(),
            peak_memory_bytes=1,
            gateway=self._joined.gateway,
            peers=self._peers,
        )
        self._heartbeats.send(beat)
        self._peers = None

    def receive(self) -> Iterator[str]:
        """Take control messages, and yield the requests that are aborted."""
        messages: list[ControlToStage] = self._control.receive()
        for message in messages:
            if isinstance(message, Peers):
                self._joined = message
                self._peers = None if message.replicas is None else list(message.replicas)
            elif isinstance(message, Credit):
                self.events.credit(message)
            elif isinstance(message, Abort):
                done = AbortDone(request_id=message.request_id, stage=self.stage, instance=self.name)
                self._control.send(done)
                yield message.request_id
        if self.inbox is not None:
            for credit in self.inbox.take_credits():
                self._control.send(credit)
        self.events.flush()


class Stream:
    """One request that is being answered."""

    def __init__(self, request: ThinkRequest, queues: Queues, text_id: int) -> None:
        self.request_id: Final = request.request_id
        self.ended = False
        self._queues = queues
        self._usage = PromptUsage(tokens=len(request.prompt_token_ids))
        self._text_id = text_id
        self._seq: dict[Kind, int] = {"text": 0, "codec": 0, "audio": 0}

    def send(self, kind: Kind) -> None:
        """Send the next event of a kind."""
        seq = self._seq[kind]
        self._seq[kind] += 1
        event: StageEvent
        if kind == "text":
            usage = self._usage if seq == 0 else None
            event = TextDelta(request_id=self.request_id, seq=seq, token_ids=[self._text_id], prompt=usage)
        elif kind == "codec":
            event = CodecDelta(request_id=self.request_id, seq=seq, token_ids=_CODES)
        else:
            samples = chunk_samples(seq)
            event = AudioChunk(request_id=self.request_id, seq=seq, samples=samples, data=_NOISE[samples])
        self._queues[kind].put(event)


_CODES: Final = list(range(CODES))
_LOUD: Final = random.Random(0).randbytes(4 * chunk_samples(len(BLOCKS)))
# Floats from 0.03 to 0.12: silence might be quicker to handle.
_PCM: Final = b"".join(
    b"%b%c\x3d" % (_LOUD[at : at + 2], _LOUD[at + 2] & 0x7F) for at in range(0, len(_LOUD), 4)
)
_NOISE: Final = {samples: Blob(_PCM[: 4 * samples]) for samples in map(chunk_samples, range(len(BLOCKS)))}


class SimulatedStages:
    """Replicas of all stages and the streams that they send.

    Args:
        config: The stack's.
        replicas: Of each stage.
    """

    def __init__(self, config: Config, replicas: int) -> None:
        random.seed(0)
        self.sent: Final[Sent] = defaultdict(lambda: {"text": [], "codec": [], "audio": []})
        self._replicas: dict[tuple[StageName, str], SimulatedReplica] = {}
        for stage in STAGES:
            for number in range(replicas):
                if number % REPLICAS_OF_A_CONTEXT == 0:
                    context = open_context(config, stage)
                inbox = "tcp://127.0.0.1:*" if stage == "thinker" else f"tcp://127.0.0.1:{number + 1}"
                replica = SimulatedReplica(context, config, stage, number, inbox)
                self._replicas[stage, replica.name] = replica
        tokenizer = Tokenizer.from_file(str(Path(config.model or "") / "tokenizer.json"))
        self._text_id: int = tokenizer.encode("a", add_special_tokens=False).ids[0]
        self._streams: dict[str, Stream] = {}
        self._due: list[tuple[float, int, Stream, Kind, Iterator[tuple[float, Kind]], float]] = []
        self._order = count()

    def run(self) -> None:
        """Serve until SIGTERM."""
        control_due = 0.0
        while True:
            now = time.monotonic()
            if now >= control_due:
                control_due = now + CONTROL_S
                self._control(now)
            self._send_due(now)
            following = min(control_due, self._due[0][0]) if self._due else control_due
            time.sleep(max(0.0, following - time.monotonic()))

    def _control(self, now: float) -> None:
        for replica in self._replicas.values():
            replica.keep_alive(now)
            for request_id in replica.receive():
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.ended = True
            if replica.inbox is not None:
                for request in replica.inbox.drain():
                    self._begin(request, now)

    def _begin(self, request: ThinkRequest, now: float) -> None:
        route = request.route
        if route is None or route.talker is None or route.token2wav is None:
            raise ValueError("a request without the route of speech")
        queues: Queues = {
            "text": self._replicas["thinker", route.thinker].events,
            "codec": self._replicas["talker", route.talker].events,
            "audio": self._replicas["token2wav", route.token2wav].events,
        }
        stream = self._streams[request.request_id] = Stream(request, queues, self._text_id)
        plan = events()
        at, kind = next(plan)
        began = now + random.random() * SPREAD_S
        heapq.heappush(self._due, (began + at, next(self._order), stream, kind, plan, began))

    def _send_due(self, now: float) -> None:
        """Send what is due now; what becomes due meanwhile waits for the next turn."""
        while self._due and self._due[0][0] <= now:
            _, _, stream, kind, plan, began = self._due[0]
            if stream.ended:
                heapq.heappop(self._due)
                continue
            self.sent[stream.request_id][kind].append(time.monotonic())
            stream.send(kind)
            at, following = next(plan)
            heapq.heapreplace(self._due, (began + at, next(self._order), stream, following, plan, began))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.stages", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the stack's YAML file")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="of each stage")
    parser.add_argument(
        "--sent", type=Path, required=True, metavar="FILE", help="where the times are written"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    stages = SimulatedStages(load_config(options.config), options.replicas)
    set_realtime_priority()
    # Collections would delay the events that are measured.
    gc.freeze()
    gc.disable()
    try:
        stages.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        options.sent.write_bytes(msgspec.msgpack.encode(dict(stages.sent)))
        # Sockets of hundreds of replicas need not be closed in order.
        os._exit(0)


if __name__ == "__main__":
    main()
