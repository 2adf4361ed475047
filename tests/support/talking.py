"""Drives a talker's service and checks the form of all that it sends."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from omnirelay.errors import OmniRelayError
from services.families.qwen2_5_omni.talker import TALKER
from services.talker.family import TalkerFamily
from services.talker.scheduler import TalkerScheduler
from services.talker.service import TalkerService
from shared.config import EngineConfig, TalkerConfig
from shared.messages import (
    CodecDelta,
    CodecTokens,
    ConditioningRows,
    FinishReason,
    ResumedSpeech,
    SpeechSettings,
    SpeechStart,
    StageEvent,
    SynthesisStart,
    Token2WavInput,
)
from shared.vllm.generating import PieceSize
from shared.vllm.tensors import pack_positions, pack_rows
from tests.support.answers import Answer, Reference, random_prompt
from tests.support.edges import Edge, MakeEdge
from tests.support.steps import StepRecord
from tests.support.thinking import Rig, speech_of


def ask(reference: Reference, length: int, seed: int = 0, **options: Any) -> Answer:
    """What transformers answers to a random prompt, in 20 text and 60 codec tokens unless told otherwise."""
    values = {"thinker_max_new_tokens": 20, "talker_max_new_tokens": 60} | options
    return reference.answer(random_prompt(length, seed), **values)


def check_codes(rig: "TalkerRig", answers: Mapping[str, Answer]) -> None:
    """Whether all were spoken as transformers speaks them."""
    assert {name: rig.codes(name) for name in answers} == {
        name: answer.codes for name, answer in answers.items()
    }


def start_of(
    request_id: str,
    answer: Answer,
    speech: SpeechSettings | None = None,
    priority: int = 0,
    resume: ResumedSpeech | None = None,
) -> SpeechStart:
    """The message that announces an answer's rows."""
    return SpeechStart(
        request_id=request_id,
        prompt_tokens=len(answer.prompt),
        priority=priority,
        speech=speech or speech_of(),
        resume=resume,
    )


def rows_of(request_id: str, answer: Answer, *cuts: int) -> Iterator[ConditioningRows]:
    """An answer's rows, as messages cut at the given positions."""
    borders = [0, *cuts, answer.rows.shape[0]]
    for seq, (start, stop) in enumerate(itertools.pairwise(borders)):
        yield rows_message(
            request_id,
            answer.rows[start:stop],
            answer.positions[:, start:stop],
            seq=seq,
            start=start,
            last=seq == len(cuts),
        )


def rows_message(
    request_id: str, rows: torch.Tensor, positions: torch.Tensor, *, seq: int = 0, start: int = 0, last: bool
) -> ConditioningRows:
    """One message of rows."""
    return ConditioningRows(
        request_id=request_id,
        seq=seq,
        start=start,
        rows=pack_rows(rows),
        additional=pack_positions(positions),
        last=last,
    )


class TalkerRig(Rig):
    """A talker in the test's process, and all that came out of it."""

    def __init__(
        self, model: Path, make_edge: MakeEdge, family: TalkerFamily = TALKER, **engine: Any
    ) -> None:
        values = {"max_model_len": 2304, "kv_cache_memory_bytes": 32 * 2**20} | engine
        self._gateway: Edge[StageEvent] = make_edge(StageEvent)
        self._token2wav: Edge[Token2WavInput] = make_edge(Token2WavInput)
        config = TalkerConfig(engine=EngineConfig(**values))
        self.service = TalkerService(family, model, config, self._gateway.push, self._token2wav.push)
        self.engine = self.service._engine
        self.forget()

    def forget(self) -> None:
        """Start anew: nothing may be in work."""
        assert self.service.active_requests() == []
        assert self.scheduler.held_bytes == 0
        # Not what the machine's speed has made of it.
        self.scheduler.piece = PieceSize(self.engine.vllm_config.scheduler_config.max_num_batched_tokens)
        self.steps = StepRecord(self.scheduler)
        self.deltas: dict[str, list[CodecDelta]] = defaultdict(list)
        self.starts: dict[str, SynthesisStart] = {}
        self.sent: dict[str, list[CodecTokens]] = defaultdict(list)
        self.finished: list[str] = []
        self.resumed: dict[str, list[int]] = {}

    @property
    def scheduler(self) -> TalkerScheduler:
        return self.service._scheduler

    def resume(self, start: SpeechStart) -> None:
        """Announce an answer, of whose speech there may be something already."""
        if start.resume is not None and (start.resume.codec_token_ids or start.resume.finish_reason):
            self.resumed[start.request_id] = start.resume.codec_token_ids
        self.service.accept(start)

    def take(self, request_id: str, answer: Answer, *cuts: int, **speech: Any) -> None:
        """Announce an answer and give all its rows."""
        self.accept(start_of(request_id, answer, speech_of(**speech)), *rows_of(request_id, answer, *cuts))

    def step(self) -> dict[str, OmniRelayError]:
        """One step, and all that it sent; nothing may be computed whose row is not there."""
        names = {speech.engine_id: name for name, speech in self.service._speeches.items()}
        with self.steps.watch(names.__getitem__):
            failures = self.service.step()
        for engine_id, request in self.scheduler.requests.items():
            assert request.num_computed_tokens <= self.scheduler._tracks[engine_id].available
        self.collect()
        return failures

    def run(self) -> None:
        """Step until all that was taken is spoken; nothing may fail."""
        self.settle()
        self.check_silent()

    def check_empty(self) -> None:
        """Nothing is in work, and nothing is held."""
        assert self.service.active_requests() == []
        self.check_silent()

    def check_silent(self) -> None:
        """Nothing is to be spoken, and nothing is held; late rows may be waited for."""
        assert self.service._speeches == {}
        assert self.scheduler.held_bytes == 0
        assert self.steps.free_blocks == self.steps.blocks

    def collect(self) -> None:
        """Sort what was sent; both copies must be equal and numbered without gap.

        Codec tokens that an earlier attempt drew come first, and only to token2wav.
        """
        for event in self._gateway.take():
            assert isinstance(event, CodecDelta)
            assert event.seq == len(self.deltas[event.request_id])
            assert event.request_id not in self.finished
            self.deltas[event.request_id].append(event)
            if event.finish_reason is not None:
                self.finished.append(event.request_id)
        for message in self._token2wav.take():
            if isinstance(message, SynthesisStart):
                assert message.request_id not in self.starts
                self.starts[message.request_id] = message
            else:
                assert message.request_id in self.starts
                sent = self.sent[message.request_id]
                assert message.seq == len(sent)
                repeated = message.request_id in self.resumed
                if sent or not repeated:
                    copy = self.deltas[message.request_id][message.seq - repeated]
                    assert message.token_ids == copy.token_ids
                    assert message.last == (copy.finish_reason is not None)
                else:
                    assert message.token_ids == self.resumed[message.request_id]
                sent.append(message)

    def codes(self, request_id: str) -> list[int]:
        """Codec tokens made so far, those that wait for the rest of their block among them."""
        speech = self.service._speeches.get(request_id)
        sent = [code for delta in self.deltas[request_id] for code in delta.token_ids]
        return sent + (speech.unsent if speech else [])

    def reason(self, request_id: str) -> FinishReason | None:
        return self.deltas[request_id][-1].finish_reason
