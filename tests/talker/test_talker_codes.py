"""The talker's codec ids equal transformers', however and whenever its rows arrive, by one worker or two."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import TalkerInput
from tests.support.answers import Answer, Reference
from tests.support.conversations import Processor, examples
from tests.support.edges import MakeEdge
from tests.support.http import Change
from tests.support.talking import TalkerRig, ask, rows_of, start_of
from tests.support.thinking import speech_of
from tests.support.workers import TWO, check_gone, prepare_two, shared_names, workers_of_engine
from tests.talker.conftest import BLOCK_SIZE, CODEC_START

LENGTHS = (1, 7, 130, 2000)


def check_all(rig: TalkerRig, answers: Mapping[str, Answer], **speech: Any) -> None:
    """Let all of them be spoken together, and compare."""
    for name, answer in answers.items():
        rig.take(name, answer, **speech)
    rig.run()
    for name, answer in answers.items():
        check(rig, name, answer)


def check(rig: TalkerRig, name: str, answer: Answer) -> None:
    assert rig.codes(name) == answer.codes
    assert rig.reason(name) == ("stop" if answer.ended else "length")


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_codes_are_transformers_codes(talker: TalkerRig, reference: Reference, length: int) -> None:
    answer = ask(reference, length)
    speech = speech_of(seed=9)
    talker.service.accept(start_of("a", answer, speech, priority=3))
    talker.accept(*rows_of("a", answer))
    talker.run()
    check(talker, "a", answer)
    assert (talker.starts["a"].speech, talker.starts["a"].priority) == (speech, 3)


def test_codes_about_media_are_transformers_codes(
    talker: TalkerRig, reference: Reference, processor: Processor
) -> None:
    options: dict[str, Any] = {"thinker_max_new_tokens": 12, "talker_max_new_tokens": 40}
    answers = {}
    for name in ("audio", "two images", "video", "video with its sound", "three turns"):
        asked = examples()[name]
        heard = asked.use_audio_in_video
        (answer,) = reference.answers_to(processor.inputs(asked), use_audio_in_video=heard, **options)
        plain = torch.arange(answer.positions.shape[1]).expand(3, -1)
        assert torch.equal(answer.positions, plain) == (name == "audio")
        answers[name.replace(" ", "-")] = answer
    check_all(talker, answers, max_tokens=40)


def test_heads_and_embeddings_of_other_sizes(other_talker: TalkerRig, other_reference: Reference) -> None:
    config = other_talker.engine.model_config.hf_config
    assert config.head_dim != config.hidden_size / config.num_attention_heads
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.embedding_size != config.hidden_size
    answers = {f"r{length}": ask(other_reference, length) for length in (1, 9, 350)}
    check_all(other_talker, answers)


def test_rows_one_by_one_with_steps_in_between(talker: TalkerRig, reference: Reference) -> None:
    answer = ask(reference, 33)
    talker.accept(start_of("a", answer))
    for arrived, message in enumerate(rows_of("a", answer, *range(1, answer.rows.shape[0])), start=1):
        talker.accept(message)
        if arrived < answer.prompt_positions:
            assert not talker.service.ready
            assert talker.step() == {}
            assert not talker.codes("a")
        elif not message.last:
            talker.settle()
            # Each row is worth one code, at once.
            assert len(talker.codes("a")) == min(arrived - answer.prompt_positions + 1, len(answer.codes))
    talker.run()
    check(talker, "a", answer)
    prompt, *decoded = talker.steps.of("a")
    assert prompt == answer.prompt_positions
    assert decoded == [1] * len(decoded)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_codes_do_not_depend_on_when_rows_arrive(
    plain_talker: TalkerRig, reference: Reference, data: st.DataObject
) -> None:
    plain_talker.forget()
    answers = {f"r{length}": ask(reference, length) for length in (7, 33, 64)}
    queues: dict[str, list[TalkerInput]] = {}
    for name, answer in answers.items():
        cuts = data.draw(st.sets(st.integers(1, answer.rows.shape[0] - 1), max_size=12), label=name)
        queues[name] = [start_of(name, answer), *rows_of(name, answer, *sorted(cuts))]
    while queues:
        name = data.draw(st.sampled_from(sorted(queues)))
        plain_talker.service.accept(queues[name].pop(0))
        if not queues[name]:
            del queues[name]
        for _ in range(data.draw(st.integers(0, 3))):
            assert plain_talker.step() == {}
    plain_talker.run()
    for name, answer in answers.items():
        check(plain_talker, name, answer)


def test_codes_after_preemption(tight_talker: TalkerRig, reference: Reference) -> None:
    # Of 14 blocks, three prompts take twelve; what is spoken needs more than the two that are left.
    answers = {f"r{seed}": ask(reference, 100, seed=seed) for seed in range(4)}
    change = Change(tight_talker.service.collect)
    check_all(tight_talker, answers)
    told = change("omnirelay_preemptions_total", stage="talker")
    assert told >= tight_talker.steps.preemptions.total() > 0
    preempted, _ = tight_talker.steps.preemptions.most_common(1)[0]
    assert sum(tight_talker.steps.of(preempted)) > 102 + 60 + 102


def test_a_held_request_is_preempted_and_goes_on(tight_talker: TalkerRig, reference: Reference) -> None:
    """One waits for rows, with its blocks, until others that go on need the memory."""
    # No end before 100 codes: of 14 blocks, the two others want seven each in the end.
    length: dict[str, Any] = {"talker_max_new_tokens": 100, "talker_min_new_tokens": 100}
    held, *others = (ask(reference, 100, seed=seed, **length) for seed in range(3))
    rows = list(rows_of("held", held, held.prompt_positions + 3))
    rig, speech = tight_talker, speech_of(max_tokens=100, min_tokens=100)
    rig.service.accept(start_of("held", held, speech, priority=9))
    rig.service.accept(rows[0])
    rig.settle()
    assert len(rig.codes("held")) == 4
    for index, answer in enumerate(others):
        rig.take(f"r{index}", answer, max_tokens=100, min_tokens=100)
    rig.settle()
    assert rig.steps.preemptions["held"] > 0
    assert rig.service.active_requests() == ["held"]
    assert len(rig.codes("held")) == 4
    assert rig.steps.free_blocks == rig.steps.blocks
    rig.service.accept(rows[1])
    rig.run()
    check(rig, "held", held)
    for index, answer in enumerate(others):
        check(rig, f"r{index}", answer)


def test_penalties_and_voices_are_transformers_and_make_other_codes(
    talker: TalkerRig, reference: Reference
) -> None:
    for option, values in (("repetition_penalty", (1.0, 1.05, 1.7)), ("speaker", ("Chelsie", "Ethan"))):
        key = option if option == "speaker" else f"talker_{option}"
        asked: list[dict[str, Any]] = [{key: value} for value in values]
        answers = {str(value): ask(reference, 33, **each) for value, each in zip(values, asked, strict=True)}
        for value, answer in zip(values, answers.values(), strict=True):
            talker.take(str(value), answer, **{option: value})
        talker.run()
        for name, answer in answers.items():
            check(talker, name, answer)
        assert len({tuple(answer.codes) for answer in answers.values()}) > 1


def test_the_last_row_repeats_when_the_text_is_used_up_and_the_end_token_stops_undelivered(
    talker: TalkerRig, reference: Reference
) -> None:
    long = ask(reference, 7, thinker_max_new_tokens=3, talker_max_new_tokens=120)
    ending = ask(reference, 2000)
    check_all(talker, {"long": long, "ending": ending}, max_tokens=120)
    assert len(long.codes) > long.rows.shape[0] - long.prompt_positions + 40
    assert ending.ended
    assert 0 < len(ending.codes) < 60
    assert talker.sent["ending"][-1].last


def test_the_pad_token_stops_and_nothing_but_codes_is_drawn(
    odd_talker: TalkerRig, odd_reference: Reference, reference: Reference
) -> None:
    answers = {f"r{length}": ask(odd_reference, length) for length in (7, 2000)}
    for name, answer in answers.items():
        odd_talker.take(name, answer)
    odd_talker.take("drawn", answers["r7"], temperature=2.0)
    odd_talker.run()
    for name, answer in answers.items():
        check(odd_talker, name, answer)
        assert answer.codes == ask(reference, len(answer.prompt)).codes
    assert odd_talker.reason("r2000") == "stop"
    assert len(odd_talker.codes("drawn")) == 60
    assert not {CODEC_START, *odd_reference.undrawable} & {*odd_talker.codes("drawn")}


def test_a_long_prompt_waits_for_all_its_rows(tight_talker: TalkerRig, reference: Reference) -> None:
    """The prompt is computed in pieces, but only when it is all there."""
    answer = ask(reference, 200)
    rig = tight_talker
    rig.service.accept(start_of("a", answer))
    messages = list(rows_of("a", answer, 150, answer.prompt_positions))
    rig.service.accept(messages[0])
    assert not rig.service.ready
    rig.step()
    assert rig.steps.of("a") == []
    rig.accept(*messages[1:])
    rig.run()
    assert rig.steps.of("a")[:3] == [96, 96, 10]
    check(rig, "a", answer)
    assert answer.prompt_positions > BLOCK_SIZE


def test_codec_tokens_are_sent_block_by_block(talker: TalkerRig, reference: Reference) -> None:
    """Token2wav cannot begin with a part of a block, and fewer messages are less work for three processes."""
    answer = ask(reference, 33)
    talker.take("a", answer, max_tokens=40)
    talker.run()
    assert talker.codes("a") == answer.codes[:40]
    sizes = [len(message.token_ids) for message in talker.sent["a"]]
    assert sizes == [12, 12, 12, 4]


@pytest.mark.long
def test_codes_of_two_workers_are_transformers_codes(
    tiny_checkpoint: Path, reference: Reference, make_edge: MakeEdge
) -> None:
    before = shared_names()
    prepare_two()
    rig = TalkerRig(tiny_checkpoint, make_edge, **TWO)
    workers = workers_of_engine(rig.engine)
    assert len(workers) == 2
    answers = {f"r{length}": ask(reference, length) for length in (1, 7, 130)}
    check_all(rig, answers)
    rig.service.close()
    check_gone(workers)
    assert shared_names() == before
