"""All three stages in the test's process, joined by real queues; the test is the gateway."""

import select
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from omnirelay.values import SAMPLE_BYTES
from services.families.family import Family
from services.families.qwen2_5_omni import QWEN2_5_OMNI
from services.talker.service import TalkerService
from services.thinker.service import ThinkerService
from services.token2wav.service import Token2WavService
from shared.config import (
    EngineConfig,
    SynthesisConfig,
    SynthesisEngineConfig,
    TalkerConfig,
    ThinkerConfig,
    ThinkerEngineConfig,
    Token2WavConfig,
)
from shared.messages import (
    AudioChunk,
    CodecDelta,
    FinishReason,
    Resume,
    ResumedSpeech,
    StageEvent,
    StageName,
    TalkerInput,
    TextDelta,
    ThinkRequest,
    Token2WavInput,
)
from shared.stage.service import StageService
from tests.support.edges import Edge, MakeEdge
from tests.support.thinking import PREPARED_S

STAGES: Final[tuple[StageName, ...]] = ("thinker", "talker", "token2wav")


@dataclass
class Held:
    """What the gateway holds of a request, over all its attempts."""

    text: list[int] = field(default_factory=list)
    text_end: FinishReason | None = None
    codes: list[int] = field(default_factory=list)
    codes_end: FinishReason | None = None
    audio: list[bytes] = field(default_factory=list)
    audio_end: bool = False

    def is_complete(self, request: ThinkRequest) -> bool:
        """Nothing is missing."""
        spoken = self.codes_end is not None and self.audio_end
        return self.text_end is not None and (spoken or request.speech is None)

    def resume(self, request: ThinkRequest, name: str) -> ThinkRequest:
        """The next attempt."""
        speech = ResumedSpeech(
            codec_token_ids=self.codes,
            finish_reason=self.codes_end,
            chunk_samples=[len(chunk) // SAMPLE_BYTES for chunk in self.audio],
        )
        resume = Resume(
            text_token_ids=self.text, finish_reason=self.text_end, speech=speech if request.speech else None
        )
        return msgspec.structs.replace(request, request_id=name, resume=resume)

    def take(self, event: StageEvent) -> None:
        """Add what came; nothing may come behind an end."""
        match event:
            case TextDelta():
                assert self.text_end is None
                self.text += event.token_ids
                self.text_end = event.finish_reason
            case CodecDelta():
                assert self.codes_end is None
                self.codes += event.token_ids
                self.codes_end = event.finish_reason
            case AudioChunk():
                assert not self.audio_end
                self.audio.append(bytes(event.data.view))
                self.audio_end = event.last
            case _:
                raise AssertionError(f"unexpected: {event}")


class Pipeline:
    """Three stages that step when they are told to, one request at a time."""

    def __init__(self, model: Path, make_edge: MakeEdge, family: Family = QWEN2_5_OMNI) -> None:
        engine: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 16 * 2**20}
        self._events: dict[StageName, Edge[StageEvent]] = {stage: make_edge(StageEvent) for stage in STAGES}
        talker: Edge[TalkerInput] = make_edge(TalkerInput)
        token2wav: Edge[Token2WavInput] = make_edge(Token2WavInput)
        self._inboxes: dict[StageName, Edge[Any]] = {"talker": talker, "token2wav": token2wav}
        self._services: dict[StageName, StageService[Any]] = {
            "thinker": ThinkerService(
                family.thinker(),
                model,
                ThinkerConfig(engine=ThinkerEngineConfig(**engine)),
                self._events["thinker"].push,
                talker.push,
            ),
            "talker": TalkerService(
                family.talker(),
                model,
                TalkerConfig(engine=EngineConfig(**engine)),
                self._events["talker"].push,
                token2wav.push,
            ),
            "token2wav": Token2WavService(
                family.token2wav(),
                model,
                Token2WavConfig(
                    engine=SynthesisEngineConfig(max_num_seqs=2, gpu_memory_utilization=0.3),
                    synthesis=SynthesisConfig(max_batch_frames=2000),
                ),
                self._events["token2wav"].push,
            ),
        }

    def begin(self, request: ThinkRequest) -> None:
        """Send a request or an attempt to the thinker; nothing else may be there."""
        assert not any(service.active_requests() for service in self._services.values())
        self._request_id = request.request_id
        self._next = dict.fromkeys(STAGES, 0)
        self._services["thinker"].accept(request)

    def step(self, stage: StageName) -> bool:
        """Let a stage take its messages and compute a step; says whether it did anything."""
        service = self._services[stage]
        messages = self._inboxes[stage].take() if stage in self._inboxes else []
        for message in messages:
            service.accept(message)
        if not service.ready:
            return bool(messages)
        assert service.step() == {}
        return True

    def deliver(self, stage: StageName, held: Held) -> None:
        """Let the gateway have what a stage has sent to it so far."""
        for event in self._events[stage].take():
            assert event.request_id == self._request_id
            assert not hasattr(event, "seq") or event.seq == self._next[stage]
            self._next[stage] += 1
            held.take(event)

    def finish(self, held: Held) -> None:
        """Go on until nobody has anything to do."""
        thinker = self._services["thinker"]
        while any([self.step(stage) for stage in STAGES]) or thinker.active_requests():
            if not thinker.ready and thinker.active_requests():
                self._wait_for_media()
        for stage in STAGES:
            self.deliver(stage, held)
        assert not any(service.active_requests() for service in self._services.values())

    def _wait_for_media(self) -> None:
        """Wait until the thinker's request is prepared, if it is not."""
        service = self._services["thinker"]
        assert isinstance(service, ThinkerService)
        if service._preparing and service.wake_fd is not None:
            readable, _, _ = select.select([service.wake_fd], [], [], PREPARED_S)
            assert readable, f"no media were prepared within {PREPARED_S} s"

    def lose(self) -> None:
        """What is under way is lost, and all stages drop the request."""
        for service in self._services.values():
            service.abort(self._request_id)
        # A step may be due for the engine to hear of it.
        for stage in STAGES:
            while self._services[stage].ready:
                self._services[stage].step()
        for edge in (*self._events.values(), *self._inboxes.values()):
            edge.take()
