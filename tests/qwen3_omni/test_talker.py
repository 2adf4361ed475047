"""The talker of Qwen3-Omni says what transformers' says; what is computed before stages are ready."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from services.families.qwen3_omni.talker import TALKER
from services.talker.engine import warm_up as warm_up_talker
from services.thinker.engine import warm_up as warm_up_thinker
from shared.messages import ResumedSpeech, SpeechStart
from tests.qwen3_omni.tiny import GROUPS, Reference, Spoken, prompt_of
from tests.support.edges import MakeEdge
from tests.support.talking import TalkerRig, rows_message
from tests.support.thinking import ThinkerRig, speech_of

FRAMES = 12


@pytest.fixture(scope="session")
def talker(checkpoint: Path, make_edge: MakeEdge, experts: None) -> TalkerRig:
    return TalkerRig(checkpoint, make_edge, TALKER, max_model_len=512)


def say(
    rig: TalkerRig,
    spoken: dict[str, Spoken],
    speakers: dict[str, str],
    resume: ResumedSpeech | None = None,
    **sampling: Any,
) -> dict[str, list[list[int]]]:
    """Give rows, and wait for all frames."""
    rig.forget()
    for name, each in spoken.items():
        speech = speech_of(speaker=speakers[name], max_tokens=FRAMES, **sampling)
        rig.resume(
            SpeechStart(
                request_id=name, prompt_tokens=each.prompt_rows, priority=0, speech=speech, resume=resume
            )
        )
        positions = torch.arange(each.rows.shape[0]).expand(3, -1)
        rig.accept(rows_message(name, each.rows, positions, last=True))
    rig.run()
    return {
        name: [codes[at : at + GROUPS] for at in range(0, len(codes), GROUPS)]
        for name, codes in ((name, rig.codes(name)) for name in spoken)
    }


def test_frames_are_the_references(talker: TalkerRig, reference: Reference) -> None:
    asked = {
        "one": (prompt_of(40, 41, 42), "ethan", 5),
        "two": (prompt_of(*range(50, 90), system=6), "chelsie", 9),
        "three": (prompt_of(33), "ethan", 2),
    }
    spoken = {
        name: reference.speak(prompt, speaker, tokens, FRAMES + 1)
        for name, (prompt, speaker, tokens) in asked.items()
    }
    speakers = {name: speaker for name, (_, speaker, _) in asked.items()}
    assert len({str(each.frames) for each in spoken.values()}) == len(spoken), "equal answers are no test"
    for name in asked:
        alone = say(talker, {name: spoken[name]}, speakers)
        assert alone[name] == spoken[name].frames[:FRAMES]
    assert say(talker, spoken, speakers) == {name: each.frames[:FRAMES] for name, each in spoken.items()}


def test_sampled_frames_depend_on_the_seed_alone(talker: TalkerRig, reference: Reference) -> None:
    sampling: Any = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05, "min_tokens": FRAMES}
    spoken = reference.speak(prompt_of(40, 41, 42), "ethan", 5, 2)

    def said(*names: str, seed: int = 7, resume: ResumedSpeech | None = None) -> dict[str, list[list[int]]]:
        speakers = dict.fromkeys(names, "ethan")
        return say(talker, dict.fromkeys(names, spoken), speakers, resume, seed=seed, **sampling)

    alone = said("alone")["alone"]
    assert said("a", "b", "c") == dict.fromkeys("abc", alone)
    begun = ResumedSpeech(codec_token_ids=[code for frame in alone[:5] for code in frame])
    assert said("again", resume=begun)["again"] == alone[5:]
    other = said("other", seed=8)["other"]
    assert all(any(one[at] != two[at] for one, two in zip(alone, other, strict=True)) for at in range(GROUPS))


def test_the_talker_completes_frames(talker: TalkerRig) -> None:
    predictor = talker.runner.get_model().code_predictor
    with mock.patch.object(predictor, "forward", wraps=predictor.forward) as completed:
        warm_up_talker(talker.engine, talker.service._rules)
    assert {call.args[0].shape[0] for call in completed.call_args_list} >= {1, 2, 8}
    assert talker.scheduler.requests == {}
    assert talker.scheduler.held_bytes == 0


def test_the_thinker_hears_and_sees(thinker: ThinkerRig) -> None:
    model = thinker.model
    with (
        mock.patch.object(model.audio_tower, "forward", wraps=model.audio_tower.forward) as heard,
        mock.patch.object(model.visual, "forward", wraps=model.visual.forward) as seen,
    ):
        warm_up_thinker(thinker.engine, thinker.service._media, thinker.service._end_tokens)
    assert heard.call_count > 2
    assert seen.call_count >= 3
    assert thinker.scheduler.requests == {}
    assert thinker.steps.free_blocks == thinker.steps.blocks
