"""Qwen3-Omni's thinker gives transformers' text, and its talker transformers' rows."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from checkpoint.qwen3_omni import TINY, write_qwen3_omni
from omnirelay.errors import CheckpointError, ConfigError, InvalidRequestError, UnknownSpeakerError
from ops.doctor.checkpoint import examine
from services.families.known import require_family
from services.families.memory import need_of, read_model, require_divisible
from services.families.qwen3_omni import QWEN3_OMNI
from services.families.qwen3_omni.thinker import Roles
from shared.checkpoints import read_config
from shared.config import Config
from shared.devices import Gpu
from shared.messages import Resume, TextSampling, ThinkRequest
from tests.qwen3_omni.tiny import ASSISTANT, IM_END, IM_START, SYSTEM, USER, Reference, Spoken, prompt_of
from tests.support.thinking import MakeThinker, ThinkerRig, speech_of, thinker_request

TEXT = 7
TOLERANCE = 1e-4
PROMPTS = {
    "turn": prompt_of(40, 41, 42),
    "system": prompt_of(*range(50, 90), system=6),
    "turns": [*prompt_of(33, 34, system=3), 60, 61, IM_END, 10, *prompt_of(65, 66, 67, 68)],
    "long": prompt_of(*(30 + at % 90 for at in range(150))),
}


def asked(name: str, prompt: list[int]) -> ThinkRequest:
    return thinker_request(name, prompt, speech=speech_of("ethan"), max_tokens=TEXT, min_tokens=TEXT)


def check(rig: ThinkerRig, name: str, spoken: Spoken) -> None:
    """Its text, and what the talker was given of it, are the reference's."""
    assert rig.text(name) == spoken.text
    assert rig.starts[name].prompt_tokens == spoken.prompt_rows
    assert torch.equal(rig.positions(name).to(torch.int64), spoken.positions)
    assert float((rig.rows(name) - spoken.rows).abs().max()) < TOLERANCE


@pytest.fixture(scope="module")
def answers(reference: Reference) -> dict[str, Spoken]:
    return {name: reference.speak(prompt, "ethan", TEXT, 2) for name, prompt in PROMPTS.items()}


def test_text_and_rows_alone_and_at_once(thinker: ThinkerRig, answers: dict[str, Spoken]) -> None:
    assert len({str(each.text) for each in answers.values()}) == len(answers), "equal answers are no test"
    for name, prompt in PROMPTS.items():
        thinker.run(asked(name, prompt))
        check(thinker, name, answers[name])
    thinker.forget()
    thinker.run(*(asked(f"{name}{again}", prompt) for name, prompt in PROMPTS.items() for again in range(2)))
    for name, spoken in answers.items():
        check(thinker, f"{name}0", spoken)
        check(thinker, f"{name}1", spoken)


def test_prompts_in_pieces_and_in_the_cache(chunked: ThinkerRig, answers: dict[str, Spoken]) -> None:
    chunked.run(*(asked(name, prompt) for name, prompt in PROMPTS.items()))
    for name, spoken in answers.items():
        check(chunked, name, spoken)
    chunked.run(asked("again", PROMPTS["long"]))
    check(chunked, "again", answers["long"])
    assert chunked.usage("again").cached_tokens >= 128


def test_voices(thinker: ThinkerRig) -> None:
    assert thinker.service.limits.speakers == ["aiden", "chelsie", "ethan"]
    with pytest.raises(UnknownSpeakerError, match="chelsie, ethan"):
        thinker.service.accept(thinker_request("b", PROMPTS["turn"], speech=speech_of("Ada")))


def test_prompts_that_nobody_can_answer_aloud(thinker: ThinkerRig) -> None:
    for prompt, problem in (
        ([40, 41], "last turn is not the assistant's"),
        ([*prompt_of(40), 50, IM_END, 10, IM_START, USER, 10, 60], "last turn is not the assistant's"),
        ([IM_START, SYSTEM, 10, IM_START, ASSISTANT, 10], "no turn of a user"),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            thinker.service.accept(asked("a", prompt))
        thinker.service.abort("a")
        thinker.run(thinker_request("text", prompt, max_tokens=2))
        assert len(thinker.text("text")) == 2
        thinker.forget()


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_ids_of_media_without_media_are_refused(thinker: ThinkerRig, kind: str) -> None:
    prompt = prompt_of(40, TINY.special_ids[f"<|{kind}_pad|>"], 41)
    with pytest.raises(InvalidRequestError, match=f"places for {kind}, but none came"):
        thinker.service.accept(thinker_request("a", prompt, max_tokens=2))


def test_turns_are_told_apart_by_the_ids_that_the_checkpoint_names(
    thinker: ThinkerRig, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reference.model.config
    others = {"im_start_token_id": 77, "user_token_id": 78, "assistant_token_id": 79}
    for name, token in others.items():
        monkeypatch.setattr(config, name, token)
    monkeypatch.setattr(thinker.service._speech, "_roles", Roles.of(config))
    prompt = [77, 78, 10, 40, 41, IM_START, USER, 77, 60, 10, 61, 77, 78, 10, 42, 77, 79, 10]
    thinker.run(asked("a", prompt))
    check(thinker, "a", reference.speak(prompt, "ethan", TEXT, 2))


def test_a_reply_is_resumed(thinker: ThinkerRig, answers: dict[str, Spoken]) -> None:
    spoken = answers["turns"]
    for ended in (False, True):
        resume = Resume(
            text_token_ids=spoken.text if ended else spoken.text[:3],
            finish_reason="length" if ended else None,
        )
        thinker.run(msgspec.structs.replace(asked("a", spoken.prompt), resume=resume))
        assert thinker.text("a") == ([] if ended else spoken.text[3:])
        assert float((thinker.rows("a") - spoken.rows).abs().max()) < TOLERANCE
        thinker.forget()


def test_a_reply_that_ends(
    thinker: ThinkerRig, reference: Reference, answers: dict[str, Spoken], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of its tokens may stand for the end: a row of it is never computed."""
    spoken = answers["system"]
    end = next(token for token in spoken.text[2:] if token not in spoken.text[:2])
    monkeypatch.setattr(thinker.service, "_end_tokens", [end])
    thinker.run(msgspec.structs.replace(asked("a", spoken.prompt), sampling=TextSampling(max_tokens=TEXT)))
    check(thinker, "a", reference.speak(spoken.prompt, "ethan", TEXT, 2, end=end))
    assert (thinker.text("a")[-1], thinker.reason("a")) == (end, "stop")


def test_after_a_preemption(checkpoint: Path, make_thinker: MakeThinker, reference: Reference) -> None:
    block = 32 * 4 * QWEN3_OMNI.paged(read_config(checkpoint))["thinker"].elements
    tight: dict[str, int] = {"max_model_len": 320, "block_size": 32, "kv_cache_memory_bytes": 15 * block}
    rig = make_thinker(checkpoint, **tight)
    prompts = {f"r{at}": prompt_of(*range(30 + at, 130 + at)) for at in range(4)}
    speech = speech_of("ethan")
    rig.run(
        *(
            thinker_request(name, prompt, speech=speech, max_tokens=40, min_tokens=40)
            for name, prompt in prompts.items()
        )
    )
    assert rig.steps.preemptions.total() > 0
    for name, prompt in prompts.items():
        check(rig, name, reference.speak(prompt, "ethan", 40, 2))


def test_a_checkpoint_of_a_thinker_alone(tmp_path: Path, make_thinker: MakeThinker) -> None:
    write_qwen3_omni(tmp_path, replace(TINY, speaks=False))
    assert require_family(tmp_path) is QWEN3_OMNI
    with pytest.raises(CheckpointError, match=r"no weights of talker, token2wav: .*`text_only`"):
        read_model(tmp_path)
    config = Config.model_validate({"model": str(tmp_path), "text_only": True, "share_gpus": True})
    model, (finding,) = examine(config)
    assert finding.level == "ok"
    assert model is not None
    gpu = Gpu(name="Stand-in", total_bytes=2**33)
    assert need_of(config, model, "thinker", gpu).fixed > model.weights.nbytes
    rig = make_thinker(tmp_path, max_model_len=256)
    prompt = PROMPTS["system"]
    rig.run(thinker_request("a", prompt, max_tokens=TEXT, min_tokens=TEXT))
    assert rig.text("a") == Reference(tmp_path).text(prompt, TEXT)
    assert rig.service.limits.speakers == []
    with pytest.raises(UnknownSpeakerError):
        rig.service.accept(asked("b", prompt))


def test_the_family_is_known(checkpoint: Path) -> None:
    assert require_family(checkpoint) is QWEN3_OMNI
    model = read_model(checkpoint)
    assert set(model.weights.elements) == {"thinker", "talker", "token2wav"}
    keys_and_values = 2 * 2 * 32
    assert {stage: each.elements for stage, each in model.paged.items()} == {
        "thinker": 4 * keys_and_values + 64,
        "talker": 3 * keys_and_values + 64,
    }
    workers = {"stages": {"thinker": {"engine": {"tensor_parallel_size": 2}}}}
    # On a CPU vLLM would compute experts of 16 columns, and give wrong values.
    with pytest.raises(ConfigError, match="its experts' blocks of 32 columns are 1"):
        require_divisible(Config.model_validate(workers), "thinker", model.paged["thinker"])
    values = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    del values["talker_config"]["text_config"]["num_key_value_heads"]
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        QWEN3_OMNI.paged(values)
