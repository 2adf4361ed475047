"""What the thinker refuses, drops or fails is one request's matter."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Qwen2_5OmniConfig

from omnirelay.errors import (
    CheckpointError,
    InvalidRequestError,
    OmniRelayError,
    PromptTooLongError,
    RepeatedMessageError,
    RequestError,
    StageFailedError,
    UnknownSpeakerError,
)
from services.families.qwen2_5_omni.thinker import THINKER, end_token_ids
from services.thinker.engine import speech_writer
from shared.messages import ThinkRequest, gateway_of
from tests.support.answers import Reference, random_prompt
from tests.support.thinking import ThinkerRig, speech_of, thinker_request

KEPT = random_prompt(20)
WRONG = {
    "an unknown voice": (
        thinker_request("bad", KEPT, speech=speech_of("Nobody")),
        UnknownSpeakerError,
        "Chelsie, Ethan",
    ),
    "a prompt that fills the model": (
        thinker_request("bad", [5] * 2304),
        PromptTooLongError,
        "2304 tokens, the thinker takes at most 2303",
    ),
    "a token that has no embedding": (
        thinker_request("bad", [1, 1600], speech=speech_of()),
        InvalidRequestError,
        "1600",
    ),
    "a temperature that vLLM does not take": (
        thinker_request("bad", KEPT, temperature=3.0),
        InvalidRequestError,
        r"temperature must be in \[0, 2\]",
    ),
    "an id in work": (thinker_request("kept", [1]), RepeatedMessageError, "kept is in work already"),
}


@pytest.mark.parametrize(("request_", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_and_harms_nobody(
    thinker: ThinkerRig, reference: Reference, request_: ThinkRequest, error: type[OmniRelayError], words: str
) -> None:
    thinker.service.accept(thinker_request("kept", KEPT, speech=speech_of()))
    thinker.step()
    with pytest.raises(error, match=words) as caught:
        thinker.service.accept(request_)
    assert isinstance(caught.value, RequestError) != isinstance(caught.value, RepeatedMessageError)
    assert thinker.service.active_requests() == ["kept"]
    thinker.run()
    assert thinker.text("kept") == reference.text(KEPT, max_tokens=40)
    assert thinker.starts.keys() == thinker.texts.keys() == {"kept"}


def test_the_longest_prompt_is_taken(thinker: ThinkerRig) -> None:
    thinker.run(thinker_request("full", random_prompt(2303)))
    assert thinker.reason("full") == "length"
    assert len(thinker.text("full")) == 1


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_abort_frees_the_blocks_and_ends_the_messages(
    chunked_thinker: ThinkerRig, reference: Reference, steps: int
) -> None:
    """Before the first step, while the prompt is computed in pieces, and while the reply is written."""
    rig, prompt = chunked_thinker, random_prompt(200, seed=4)
    rig.service.accept(thinker_request("dropped", prompt, speech=speech_of()))
    rig.advance(steps)
    assert (rig.steps.free_blocks < rig.steps.blocks) == (steps > 0)
    assert bool(rig.text("dropped")) == (steps == 9)
    before = (rig.text("dropped"), len(rig.tracks["dropped"]))
    rig.service.abort("dropped")
    assert rig.steps.free_blocks == rig.steps.blocks
    assert not rig.service.holds("dropped")
    rig.run(thinker_request("next", KEPT, speech=speech_of()))
    assert (rig.text("dropped"), len(rig.tracks["dropped"])) == before
    assert rig.text("next") == reference.text(KEPT, max_tokens=40)


def test_abort_spares_the_others_and_the_id_can_be_used_again(
    thinker: ThinkerRig, reference: Reference
) -> None:
    thinker.service.accept(thinker_request("kept", KEPT, speech=speech_of()))
    thinker.service.accept(thinker_request("again", random_prompt(64)))
    thinker.step()
    thinker.step()
    thinker.service.abort("again")
    thinker.service.abort("unknown")
    del thinker.texts["again"]
    thinker.run(thinker_request("again", random_prompt(7)))
    assert thinker.text("kept") == reference.text(KEPT, max_tokens=40)
    assert thinker.text("again") == reference.text(random_prompt(7), max_tokens=40)


def test_abort_of_a_request_whose_rows_were_not_read_yet(thinker: ThinkerRig, reference: Reference) -> None:
    """Rows of an aborted request that a step made readable are passed over."""
    thinker.service.accept(thinker_request("dropped", random_prompt(64), speech=speech_of()))
    thinker.service.accept(thinker_request("kept", KEPT, speech=speech_of()))
    step = thinker.engine.step

    def step_and_abort() -> object:
        outputs = step()
        thinker.service.abort("dropped")
        return outputs

    with mock.patch.object(thinker.engine, "step", step_and_abort):
        assert thinker.step() == {}
    thinker.run()
    assert "dropped" not in thinker.tracks
    assert "dropped" not in thinker.texts
    assert thinker.text("kept") == reference.text(KEPT, max_tokens=40)


@pytest.mark.parametrize("fault", [RuntimeError("out of order"), StageFailedError("out of order")], ids=repr)
def test_an_exception_while_preparing_one_request_fails_that_one(
    thinker: ThinkerRig, reference: Reference, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    others = {f"r{seed}": random_prompt(40, seed=seed) for seed in range(3)}
    thinker.service.accept(thinker_request("broken", random_prompt(7), speech=speech_of(), min_tokens=20))
    thinker.accept(*(thinker_request(name, prompt, speech=speech_of()) for name, prompt in others.items()))
    thinker.step()
    broken = thinker.service._generations["broken"].engine_id
    slots = thinker.scheduler.slot_map.slots

    def break_one(engine_id: str, start: int, stop: int) -> torch.Tensor:
        if engine_id == broken:
            raise fault
        return slots(engine_id, start, stop)

    with mock.patch.object(thinker.scheduler.slot_map, "slots", break_one):
        failures = thinker.step()
    assert failures.keys() == {"broken"}
    assert isinstance(failures["broken"], StageFailedError)
    assert "out of order" in str(failures["broken"])
    assert f"request {broken} failed: stage_failed" in caplog.text
    assert "out of order" in caplog.text
    thinker.service.abort("broken")
    thinker.run()
    for name, prompt in others.items():
        assert thinker.text(name) == reference.text(prompt, max_tokens=40)
    assert "broken" not in thinker.finished


def without(config: dict[str, object], key: str) -> dict[str, object]:
    return {
        name: without(value, key) if isinstance(value, dict) else value
        for name, value in config.items()
        if name != key
    }


def test_a_config_without_an_end_token_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    values = json.loads((tiny_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(without(values, "eos_token_id")))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        end_token_ids(Qwen2_5OmniConfig.from_pretrained(tmp_path))
    assert end_token_ids(Qwen2_5OmniConfig.from_pretrained(tiny_checkpoint)) == [
        values["thinker_config"]["eos_token_id"]
    ]


def test_the_end_tokens_may_be_a_list_or_stand_with_the_text_config() -> None:
    text = SimpleNamespace(eos_token_id=[3, 4])
    thinker = SimpleNamespace(eos_token_id=None, get_text_config=lambda: text)
    assert end_token_ids(SimpleNamespace(thinker_config=thinker)) == [3, 4]


def test_a_voice_whose_token_has_no_embedding_is_refused(thinker: ThinkerRig, tmp_path: Path) -> None:
    voice = {"cond": torch.zeros(1, 4), "ref_mel": torch.zeros(1, 4, 80), "bos_token": 1600}
    torch.save({"Nobody": voice}, tmp_path / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=r"\[1600\].*outside the vocabulary of 1600"):
        speech_writer(THINKER, thinker.engine, tmp_path)


def test_a_closing_token_without_an_embedding_is_refused(
    thinker: ThinkerRig, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = thinker.engine.model_config.hf_config.talker_config
    monkeypatch.setattr(talker, "tts_text_pad_token_id", 151859)
    with pytest.raises(CheckpointError, match=r"\[151859\]"):
        speech_writer(THINKER, thinker.engine, tiny_checkpoint)


def test_a_place_goes_to_the_gateway_with_the_fewest_running(single_thinker: ThinkerRig) -> None:
    """Many requests of one gateway keep the only one of another waiting for one of them, not for all."""
    flood = [thinker_request(f"aaaaaaaa{number}", [5] * 8, max_tokens=4) for number in range(6)]
    urgent = thinker_request("aaaaaaaa6", [5] * 8, max_tokens=4, priority=-1)
    single_thinker.service.accept(flood[0])
    single_thinker.step()
    single_thinker.accept(*flood[1:], thinker_request("bbbbbbbb0", [5] * 8, max_tokens=4), urgent)
    single_thinker.run()
    # Priority comes before that.
    assert single_thinker.finished[:4] == ["aaaaaaaa0", "aaaaaaaa6", "bbbbbbbb0", "aaaaaaaa1"]


def test_gateways_share_the_places(tiny_checkpoint: Path, make_thinker: Any) -> None:
    rig = make_thinker(tiny_checkpoint, max_num_seqs=4)
    names = [*(f"aaaaaaaa{number}" for number in range(8)), *(f"bbbbbbbb{number}" for number in range(4))]
    rig.accept(*(thinker_request(name, [5] * 8, min_tokens=30, max_tokens=30) for name in names))
    rig.advance(8)
    running = sorted(gateway_of(each.request_id) for each in rig.scheduler.running)
    assert running == ["aaaaaaaa"] * 2 + ["bbbbbbbb"] * 2
    rig.run()
    assert len(rig.finished) == 12
