"""Sounds, pictures and videos: text, rows and positions are transformers', however they are computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from shared.messages import ThinkRequest
from tests.support.answers import Answer, Reference
from tests.support.conversations import Conversation, Item, Processor, Turn, asks, examples
from tests.support.media import picture, spoken
from tests.support.thinking import ThinkerRig, speech_of, thinker_request

TEXT_TOKENS = 20
TOLERANCE = 1e-4


def request_of(name: str, conversation: Conversation, processor: Processor, **options: int) -> ThinkRequest:
    return thinker_request(
        name,
        processor.prompt(conversation),
        speech=speech_of(),
        media=conversation.media,
        use_audio_in_video=conversation.use_audio_in_video,
        **({"max_tokens": TEXT_TOKENS} | options),
    )


def expected(conversation: Conversation, processor: Processor, reference: Reference) -> Answer:
    (answer,) = reference.answers_to(
        processor.inputs(conversation),
        use_audio_in_video=conversation.use_audio_in_video,
        thinker_max_new_tokens=TEXT_TOKENS,
        talker_max_new_tokens=2,
    )
    return answer


def check(rig: ThinkerRig, name: str, answer: Answer) -> None:
    assert rig.starts[name].prompt_tokens == len(answer.prompt)
    usage = rig.texts[name][0].prompt
    assert usage is not None
    assert usage.tokens == len(answer.prompt)
    assert rig.text(name) == answer.text
    assert torch.equal(rig.positions(name).to(torch.int64), answer.positions)
    assert rig.rows(name).shape == answer.rows.shape
    assert float((rig.rows(name) - answer.rows).abs().max()) < TOLERANCE


@pytest.fixture(scope="module")
def answers(processor: Processor, reference: Reference) -> dict[str, Answer]:
    return {name: expected(each, processor, reference) for name, each in examples().items()}


@pytest.mark.parametrize("name", examples())
def test_text_and_rows_are_transformers(
    thinker: ThinkerRig, processor: Processor, answers: dict[str, Answer], name: str
) -> None:
    thinker.run(request_of("a", examples()[name], processor))
    check(thinker, "a", answers[name])


def test_what_is_seen_and_heard_changes_the_answer(answers: dict[str, Answer]) -> None:
    # The oracle itself: else the comparisons above would hold for a model that is blind and deaf.
    kinds = ["audio", "image", "video", "two audios", "two images", "image, audio and text"]
    assert len({tuple(answers[name].text) for name in kinds}) == len(kinds)


def test_eight_different_ones_at_once(
    thinker: ThinkerRig, processor: Processor, answers: dict[str, Answer]
) -> None:
    names = dict(zip("abcdefgh", examples(), strict=False))
    thinker.run(*(request_of(short, examples()[name], processor) for short, name in names.items()))
    for short, name in names.items():
        check(thinker, short, answers[name])
    assert max(len(step) for step in thinker.steps.scheduled) >= 4


@pytest.mark.parametrize("name", ["two images", "everything, with two videos' sound", "three turns"])
def test_steps_that_cut_through_media(
    chunked_thinker: ThinkerRig, processor: Processor, answers: dict[str, Answer], name: str
) -> None:
    chunked_thinker.run(request_of("a", examples()[name], processor))
    check(chunked_thinker, "a", answers[name])
    pieces = [count for count in chunked_thinker.steps.of("a") if count > 1]
    assert max(pieces) <= 48
    assert len(pieces) >= len(answers[name].prompt) // 48


@contextmanager
def encoder_calls(rig: ThinkerRig) -> Iterator[dict[str, int]]:
    """Counts how often the encoders compute something."""
    model = rig.model
    counts = {"audio": 0, "vision": 0}
    with (
        mock.patch.object(model.audio_tower, "forward", wraps=model.audio_tower.forward) as audio,
        mock.patch.object(model.visual, "forward", wraps=model.visual.forward) as vision,
    ):
        yield counts
        counts |= {"audio": audio.call_count, "vision": vision.call_count}


def test_a_second_turn_computes_only_what_is_new(
    thinker: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    image, speech = Item("image", picture("png", 11)), Item("audio", spoken("flac", "Look at this picture."))
    first = (Turn("user", (image, speech)),)
    second = (*first, Turn("assistant", ("Yes.",)), Turn("user", ("And what else?",)))
    thinker.run(request_of("first", Conversation(first), processor))
    with encoder_calls(thinker) as calls:
        thinker.run(request_of("second", Conversation(second), processor))
    assert calls == {"audio": 0, "vision": 0}
    answer = expected(Conversation(second), processor, reference)
    check(thinker, "second", answer)
    usage = thinker.texts["second"][0].prompt
    assert usage is not None
    # All whole blocks of the first prompt.
    block = thinker.engine.vllm_config.cache_config.block_size
    shared = thinker.starts["first"].prompt_tokens - 4
    assert usage.cached_tokens == shared // block * block > 0
    assert sum(thinker.steps.of("second")) < len(answer.prompt) - usage.cached_tokens + len(answer.text)


def test_the_encoders_output_is_used_again_at_another_place(
    thinker: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    image, speech = Item("image", picture("png", 12)), Item("audio", spoken("flac", "Once more, please."))
    thinker.run(request_of("first", asks(image, speech, "What?"), processor))
    moved = asks("Quite another beginning.", speech, image, "What?")
    with encoder_calls(thinker) as calls:
        thinker.run(request_of("second", moved, processor))
    assert calls == {"audio": 0, "vision": 0}
    check(thinker, "second", expected(moved, processor, reference))
    usage = thinker.texts["second"][0].prompt
    assert usage is not None
    assert usage.cached_tokens == 0


def test_equal_prompts_with_other_media_share_nothing(
    thinker: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    pair = {
        name: asks(Item("image", picture("png", seed)), "Which?") for name, seed in (("a", 13), ("b", 14))
    }
    assert processor.prompt(pair["a"]) == processor.prompt(pair["b"])
    for name, conversation in pair.items():
        thinker.run(request_of(name, conversation, processor))
        check(thinker, name, expected(conversation, processor, reference))
        usage = thinker.texts[name][0].prompt
        assert usage is not None
        assert usage.cached_tokens == 0
    assert thinker.text("a") != thinker.text("b")


def test_after_a_preemption(tight_thinker: ThinkerRig, processor: Processor, reference: Reference) -> None:
    # Of 14 blocks, three prompts take twelve; their replies need more than the two that are left.
    conversations = {
        f"r{seed}": asks(Item("image", picture("png", seed, 308, 252)), "What is here?")
        for seed in range(20, 24)
    }
    lengths = {len(processor.inputs(each)["input_ids"][0]) for each in conversations.values()}
    assert lengths <= set(range(120, 129))
    tight_thinker.run(*(request_of(name, each, processor) for name, each in conversations.items()))
    assert tight_thinker.steps.preemptions.total() > 0
    for name, conversation in conversations.items():
        check(tight_thinker, name, expected(conversation, processor, reference))


def test_text_and_media_side_by_side(
    thinker: ThinkerRig, processor: Processor, reference: Reference, answers: dict[str, Answer]
) -> None:
    text = asks("Who are you?")
    thinker.run(
        request_of("text", text, processor),
        request_of("media", examples()["image, audio and text"], processor),
        request_of("text2", text, processor),
    )
    check(thinker, "media", answers["image, audio and text"])
    check(thinker, "text", expected(text, processor, reference))
    check(thinker, "text2", expected(text, processor, reference))
