"""Drives a thinker's service and checks the form of all that it sends."""

import os
import select
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from omnirelay.errors import OmniRelayError, RequestError
from services.families.qwen2_5_omni.thinker import THINKER
from services.thinker.family import ThinkerFamily
from services.thinker.scheduler import ThinkerScheduler
from services.thinker.service import ThinkerService
from shared.config import MediaConfig, ThinkerConfig, ThinkerEngineConfig
from shared.messages import (
    ConditioningRows,
    Early,
    FinishReason,
    MediaItem,
    PromptUsage,
    Sampling,
    SpeechSettings,
    SpeechStart,
    StageEvent,
    TalkerInput,
    TextDelta,
    TextSampling,
    ThinkerInput,
    ThinkRequest,
)
from shared.vllm.generating import PieceSize
from shared.vllm.tensors import unpack_positions, unpack_rows
from tests.support.edges import Edge, MakeEdge
from tests.support.steps import StepRecord

if TYPE_CHECKING:
    from tests.support.conversations import Conversation, Processor

PREPARED_S = 60.0


def speech_of(
    speaker: str = "Ethan",
    *,
    seed: int = 1,
    streaming: bool = True,
    chunk_frames: Sequence[int] = (),
    **sampling: Any,
) -> SpeechSettings:
    """Speech settings, greedy with the released repetition penalty unless told otherwise."""
    values = {"max_tokens": 60, "repetition_penalty": 1.05} | sampling
    return SpeechSettings(
        speaker=speaker,
        sampling=Sampling(**values),
        seed=seed,
        streaming=streaming,
        chunk_frames=list(chunk_frames),
    )


def thinker_request(
    request_id: str,
    prompt: list[int],
    *,
    speech: SpeechSettings | None = None,
    seed: int = 1,
    priority: int = 0,
    media: list[MediaItem] | None = None,
    use_audio_in_video: bool = False,
    **sampling: Any,
) -> ThinkRequest:
    """A request, greedy unless told otherwise."""
    return ThinkRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=TextSampling(**({"max_tokens": 40} | sampling)),
        seed=seed,
        priority=priority,
        speech=speech,
        media=media or [],
        use_audio_in_video=use_audio_in_video,
    )


def request_about(
    request_id: str, conversation: "Conversation", processor: "Processor", **options: Any
) -> ThinkRequest:
    """A request about a conversation, spoken unless told otherwise."""
    values = {"speech": speech_of()} | options
    return thinker_request(
        request_id,
        processor.prompt(conversation),
        media=conversation.media,
        use_audio_in_video=conversation.use_audio_in_video,
        **values,
    )


def early_request(
    request_id: str,
    prompt: list[int],
    media: Sequence[MediaItem] = (),
    early: Early = "prompt",
    **fields: Any,
) -> ThinkRequest:
    """A prompt to be computed ahead of its request."""
    return ThinkRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        media=list(media),
        sampling=TextSampling(max_tokens=1),
        seed=0,
        early=early,
        **fields,
    )


class Rig(ABC):
    """A stage in the test's process."""

    service: Any
    engine: Any

    @abstractmethod
    def forget(self) -> None:
        """Start anew: nothing may be in work."""

    @abstractmethod
    def step(self) -> dict[str, OmniRelayError]:
        """One step, and all that it sent."""

    @property
    def runner(self) -> Any:
        """vLLM's, of the only worker."""
        return self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def accept(self, *messages: Any) -> None:
        for message in messages:
            self.service.accept(message)

    def advance(self, steps: int) -> None:
        """So many steps, in which nothing may fail."""
        for _ in range(steps):
            assert self.step() == {}

    def settle(self) -> None:
        """Step while there is something to do; nothing may fail."""
        while self.service.ready:
            assert self.step() == {}


AnyRig = TypeVar("AnyRig", bound=Rig)


def fresh(rig: AnyRig) -> Iterator[AnyRig]:
    """A rig with nothing in it, before and after a test."""
    rig.forget()
    yield rig
    for request_id in rig.service.active_requests():
        rig.service.abort(request_id)
    while rig.service.ready:
        rig.step()


class ThinkerRig(Rig):
    """A thinker in the test's process, and all that came out of it."""

    def __init__(
        self,
        model: Path,
        make_edge: MakeEdge,
        *,
        family: ThinkerFamily = THINKER,
        media: MediaConfig | None = None,
        **engine: Any,
    ) -> None:
        values = {"max_model_len": 2304, "kv_cache_memory_bytes": 32 * 2**20} | engine
        self._gateway: Edge[StageEvent] = make_edge(StageEvent)
        self._talker: Edge[TalkerInput] = make_edge(TalkerInput)
        config = ThinkerConfig(engine=ThinkerEngineConfig(**values))
        self.service = ThinkerService(family, model, config, self._gateway.push, self._talker.push, media)
        self.engine = self.service._engine
        self.forget()

    def forget(self) -> None:
        """Start anew: nothing may be in work."""
        assert self.service.active_requests() == []
        # Not what the machine's speed has made of it.
        self.scheduler.piece = PieceSize(self.engine.vllm_config.scheduler_config.max_num_batched_tokens)
        self.steps = StepRecord(self.scheduler)
        self.texts: dict[str, list[TextDelta]] = defaultdict(list)
        self.starts: dict[str, SpeechStart] = {}
        self.tracks: dict[str, list[ConditioningRows]] = defaultdict(list)
        self.finished: list[str] = []
        self.prefilled: dict[str, PromptUsage] = {}

    @property
    def scheduler(self) -> ThinkerScheduler:
        return self.service._scheduler

    @property
    def model(self) -> Any:
        """The model that the engine runs."""
        return self.runner.model

    def step(self) -> dict[str, OmniRelayError]:
        """One step, and all that it sent."""
        # Asked during the step, which begins the requests whose media are ready.
        with self.steps.watch(self._name_of):
            failures = self.service.step()
        self.collect()
        return failures

    def run(self, *requests: ThinkerInput) -> None:
        """Take requests, wait until all media are prepared, and step until all is done; none may fail."""
        self.accept(*requests)
        while len(self.service._preparer._outcomes) < len(self.service._preparing):
            self._wait_for_media()
        while self.service.active_requests():
            self.wait()
            assert self.step() == {}
        assert self.steps.free_blocks == self.steps.blocks
        assert self.service.load().held_bytes == 0

    def wait(self) -> None:
        """Wait until a step would do something, as the stage's loop does."""
        while not self.service.ready:
            self._wait_for_media()

    def failure(self, request: ThinkRequest) -> OmniRelayError:
        """The error with which a request ends that cannot be served."""
        try:
            self.service.accept(request)
        except RequestError as error:
            return error
        failures: dict[str, OmniRelayError] = {}
        while request.request_id not in failures:
            self.wait()
            failures |= self.step()
        self.service.abort(request.request_id)
        return failures[request.request_id]

    def collect(self) -> None:
        """Sort what was sent; deltas, and rows of a request, must be numbered without gap."""
        for event in self._gateway.take():
            assert isinstance(event, TextDelta)
            if not event.token_ids:
                assert event.finish_reason == "length"
                assert event.prompt is not None
                assert event.request_id not in self.prefilled
                self.prefilled[event.request_id] = event.prompt
                continue
            assert event.seq == len(self.texts[event.request_id])
            assert event.request_id not in self.finished
            self.texts[event.request_id].append(event)
            if event.finish_reason is not None:
                self.finished.append(event.request_id)
        for message in self._talker.take():
            if isinstance(message, SpeechStart):
                assert message.request_id not in self.starts
                self.starts[message.request_id] = message
            else:
                self._add_rows(message)

    def text(self, request_id: str) -> list[int]:
        return [token for delta in self.texts[request_id] for token in delta.token_ids]

    def usage(self, request_id: str) -> PromptUsage:
        """What is told of its prompt with its first token."""
        usage = self.texts[request_id][0].prompt
        assert usage is not None
        return usage

    def reason(self, request_id: str) -> FinishReason | None:
        return self.texts[request_id][-1].finish_reason

    def rows(self, request_id: str) -> torch.Tensor:
        """The whole track, ``[positions, hidden]``."""
        return torch.cat([unpack_rows(message.rows) for message in self.tracks[request_id]])

    def positions(self, request_id: str) -> torch.Tensor:
        """Its position ids, int32 ``[3, positions]``."""
        parts = [
            unpack_positions(message.additional, message.rows.shape[0]) for message in self.tracks[request_id]
        ]
        return torch.cat(parts, dim=1)

    def _name_of(self, engine_id: str) -> str:
        return self.service._by_engine_id[engine_id].request_id

    def _wait_for_media(self) -> None:
        assert self.service.wake_fd is not None
        readable, _, _ = select.select([self.service.wake_fd], [], [], PREPARED_S)
        assert readable, f"no media were prepared within {PREPARED_S} s"
        os.eventfd_read(self.service.wake_fd)

    def _add_rows(self, message: ConditioningRows) -> None:
        track = self.tracks[message.request_id]
        assert message.request_id in self.starts
        assert message.seq == len(track)
        assert message.start == sum(earlier.rows.shape[0] for earlier in track)
        assert not any(earlier.last for earlier in track)
        track.append(message)


MakeThinker = Callable[..., ThinkerRig]


def kept_thinkers(make_edge: MakeEdge, **common: Any) -> Iterator[MakeThinker]:
    """Gives the session's thinker of a kind: one that is collected takes vLLM's process groups with it."""
    kept: list[ThinkerRig] = []

    @cache
    def make(model: Path, **engine: Any) -> ThinkerRig:
        kept.append(ThinkerRig(model, make_edge, **(common | engine)))
        return kept[-1]

    yield make
    for rig in kept:
        rig.service._grammars.close()
        rig.service._preparer.close()
