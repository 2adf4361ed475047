"""A stage's process without a model, for the launcher's tests: ``run(name)``.

It speaks the real messages; the thinker answers for all three stages, with the key of each where there are
keys.  ``FAKE_<STAGE>`` in the
environment makes a stage misbehave: ``fail`` ends it at once, ``stubborn`` lets it ignore SIGTERM, ``mute``
lets it answer nothing.  At SIGUSR1 a stage ends as one whose engine has failed.
"""

import os
import secrets
import signal
import sys
from pathlib import Path

import msgspec

from omnirelay.errors import EngineFailedError
from shared.config import Config, load_config
from shared.ending import leave_on_signals
from shared.messages import (
    STAGES,
    AudioChunk,
    CodecDelta,
    Credit,
    Farewell,
    Heartbeat,
    Peers,
    RequestFailed,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    TextDelta,
    ThinkRequest,
    control_identity,
)
from shared.messages.payloads import Blob
from shared.transport.control import ControlClient
from shared.transport.curve import StackContext, open_context
from shared.transport.queues import PullQueue, PushQueue, Sending
from tests.gateway.fake_stages import placeholder_ids, problem_of, usage


def begin(name: StageName) -> str | None:
    """Behave from the start as the environment says; gives how."""
    behaviour = os.environ.get(f"FAKE_{name.upper()}")
    if behaviour == "fail":
        sys.stderr.write(f"the {name} has no reason to live\n")
        sys.exit(3)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        leave_on_signals()
    return behaviour


def run(name: StageName) -> None:
    behaviour = begin(name)
    config = load_config(Path(sys.argv[-1]) if "--config" in sys.argv else None)
    context = open_context(config, name)
    instance = secrets.token_hex(4)
    identity = control_identity(name, instance)
    controls = [ControlClient(context, gateway.control, identity) for gateway in config.gateway.addresses]
    events = queues_of(config, context, name, instance)
    inbox: PullQueue[ThinkRequest] = PullQueue(context, config.stage(name).inbox, ThinkRequest)
    speakers = ["Chelsie"] if name == "token2wav" else []
    limits = StageLimits(max_positions=4096, speakers=speakers)
    placeholders = placeholder_ids(config.model or "")

    def fail(*_: object) -> None:
        controls[0].send(Farewell(stage=name, instance=instance))
        sys.exit(EngineFailedError.exit_status)

    signal.signal(signal.SIGUSR1, fail)
    sys.stdout.write(f"{name} says hello\n")
    joined, peers = ["none"] * len(controls), list[str]()
    while True:
        beat = Heartbeat(
            stage=name,
            pid=os.getpid(),
            instance=instance,
            inbox=inbox.endpoint,
            limits=limits,
            load=StageLoad(),
            peak_memory_bytes=1,
            peers=peers,
        )
        for number, control in enumerate(controls):
            control.send(msgspec.structs.replace(beat, gateway=joined[number]))
            for message in control.receive():
                if isinstance(message, Peers):
                    joined[number] = message.gateway
                    peers = peers if message.replicas is None else list(message.replicas)
                elif isinstance(message, Credit):
                    events[name].credit(message)
        for request in inbox.drain():
            if problem := problem_of(request, placeholders):
                failed = RequestFailed(
                    request_id=request.request_id, stage=name, code="stage_failed", message=problem
                )
                events[name].put(failed)
            elif behaviour != "mute":
                answer(events, request)
        # Only the first gateway's requests are answered.
        send_what_waits(controls[0], inbox, events)
        inbox.socket.poll(20)


def send_what_waits(
    control: ControlClient, inbox: PullQueue[ThinkRequest], events: "dict[StageName, PushQueue[StageEvent]]"
) -> None:
    for credit in inbox.take_credits():
        control.send(credit)
    for queue in events.values():
        queue.flush()


def queues_of(
    config: Config, context: StackContext, name: StageName, instance: str
) -> dict[StageName, PushQueue[StageEvent]]:
    """For each stage that the process answers for, a queue with that stage's key."""
    return {
        stage: PushQueue(
            context if stage == name else open_context(config, stage),
            config.gateway.events,
            Sending(control_identity(stage, instance)),
            "gateway",
        )
        for stage in (STAGES if name == "thinker" else (name,))
    }


def answer(events: "dict[StageName, PushQueue[StageEvent]]", request: ThinkRequest) -> None:
    name = request.request_id
    ids = request.prompt_token_ids[:3]
    events["thinker"].put(
        TextDelta(request_id=name, seq=0, token_ids=ids, finish_reason="stop", prompt=usage(request))
    )
    if request.speech is not None:
        events["talker"].put(CodecDelta(request_id=name, seq=0, token_ids=[7] * 50, finish_reason="length"))
        pcm = Blob(b"\0\0\0\x3f" * 24_000)
        events["token2wav"].put(AudioChunk(request_id=name, seq=0, samples=24_000, data=pcm, last=True))
