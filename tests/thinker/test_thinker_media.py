"""Sounds, pictures and videos: text, rows and positions are transformers', however they are computed."""

import string
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine import EngineCoreRequest

from omnirelay.errors import MediaTooLargeError, OmniRelayError, StageFailedError
from shared.messages import MediaKind, Resume, ThinkRequest
from tests.support.answers import Answer, Reference, random_prompt
from tests.support.conversations import (
    TEXT_TOKENS,
    Conversation,
    Item,
    Processor,
    Turn,
    asks,
    examples,
    expected,
)
from tests.support.media import clip, encode_audio, picture, speech, spoken
from tests.support.thinking import ThinkerRig, early_request, request_about, thinker_request
from tests.thinker.conftest import BLOCK_SIZE

TOLERANCE = 1e-4


def request_of(name: str, conversation: Conversation, processor: Processor, **options: int) -> ThinkRequest:
    return request_about(name, conversation, processor, **({"max_tokens": TEXT_TOKENS} | options))


def check(rig: ThinkerRig, name: str, answer: Answer) -> None:
    assert rig.starts[name].prompt_tokens == len(answer.prompt)
    assert rig.usage(name).tokens == len(answer.prompt)
    assert rig.text(name) == answer.text
    assert torch.equal(rig.positions(name).to(torch.int64), answer.positions)
    assert rig.rows(name).shape == answer.rows.shape
    assert float((rig.rows(name) - answer.rows).abs().max()) < TOLERANCE


@pytest.fixture(scope="module")
def answers(processor: Processor, reference: Reference) -> dict[str, Answer]:
    return {name: expected(each, processor, reference) for name, each in examples().items()}


@pytest.mark.parametrize("name", ["two audios", "everything, with two videos' sound"])
def test_media_in_bfloat16(
    half_thinker: ThinkerRig, processor: Processor, answers: dict[str, Answer], name: str
) -> None:
    half_thinker.run(request_of("a", examples()[name], processor))
    answer = answers[name]
    assert torch.equal(
        half_thinker.positions("a")[:, : len(answer.prompt)].to(torch.int64),
        answer.positions[:, : len(answer.prompt)],
    )
    rows, exact = half_thinker.rows("a")[: len(answer.prompt)].float(), answer.rows[: len(answer.prompt)]
    assert (rows - exact).norm() / exact.norm() < 0.05


def test_text_and_rows_are_transformers(
    thinker: ThinkerRig, processor: Processor, reference: Reference, answers: dict[str, Answer]
) -> None:
    names = dict(zip(string.ascii_lowercase, examples(), strict=False))
    text = asks("Who are you?")
    thinker.run(
        *(request_of(short, examples()[name], processor) for short, name in names.items()),
        request_of("text", text, processor),
    )
    check(thinker, "text", expected(text, processor, reference))
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
    usage = thinker.usage("second")
    # All whole blocks of the first prompt.
    block = thinker.engine.vllm_config.cache_config.block_size
    shared = thinker.starts["first"].prompt_tokens - 4
    assert usage.cached_tokens == shared // block * block > 0
    assert sum(thinker.steps.of("second")) < len(answer.prompt) - usage.cached_tokens + len(answer.text)


def test_recordings_of_many_windows(
    chunked_thinker: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    # More windows than a request may have recordings, some of them alike, cut by steps and blocks.
    said = speech("One, two, three, four, five, six, seven, eight, nine, and so on, until nobody counts.")
    silence = np.zeros(7 * 16_000, np.float32)
    wav = encode_audio(np.concatenate([said, silence, said, said, silence, said[:20_000]]), 16_000, "wav")
    conversation = asks(Item("audio", wav), "What do you hear?")
    answer = expected(conversation, processor, reference)
    assert (answer.positions.shape[1] - 60) // 50 > 12
    with encoder_calls(chunked_thinker) as calls:
        chunked_thinker.run(request_of("a", conversation, processor))
    check(chunked_thinker, "a", answer)
    assert calls["audio"] > 2
    with encoder_calls(chunked_thinker) as calls:
        chunked_thinker.run(request_of("b", conversation, processor))
    check(chunked_thinker, "b", answer)
    assert calls["audio"] == 0


@pytest.fixture
def wide(chunked_thinker: ThinkerRig, processor: Processor) -> ThinkRequest:
    """A request with a video that is wider than its sound is long, answered by a thinker that knew nothing.

    The text behind the video, the reply too, counts from the end of the sound, not from the largest position.
    """
    conversation = asks(Item("video", clip("mp4", 1.0, 4, 1680, 56, text="Hi.")), use_audio_in_video=True)
    request = request_of("first", conversation, processor, max_tokens=80, min_tokens=80)
    chunked_thinker.engine.reset_prefix_cache()
    chunked_thinker.run(request)
    return request


def resumed(request: ThinkRequest, text: list[int]) -> ThinkRequest:
    return msgspec.structs.replace(request, request_id="resumed", resume=Resume(text_token_ids=text))


@pytest.mark.parametrize("drawn_anew", [True, False], ids=["drawn", "read again"])
def test_a_reply_counts_on_from_the_last_token_and_is_found_in_the_next_turn(
    chunked_thinker: ThinkerRig,
    wide: ThinkRequest,
    reference: Reference,
    processor: Processor,
    drawn_anew: bool,
) -> None:
    reply = chunked_thinker.text("first")
    first = Conversation((Turn("user", (Item("video", bytes(wide.media[0].data.view)),)),), True)
    chunked_thinker.run(request_of("again", first, processor))
    check(chunked_thinker, "again", expected(first, processor, reference))
    if not drawn_anew:
        chunked_thinker.engine.reset_prefix_cache()
        chunked_thinker.run(resumed(wide, reply[:50]))
    more = [*reply, *random_prompt(20)]
    second = {"request_id": "second", "prompt_token_ids": [*wide.prompt_token_ids, *more]}
    sampling = msgspec.structs.replace(wide.sampling, max_tokens=TEXT_TOKENS, min_tokens=0)
    chunked_thinker.run(msgspec.structs.replace(wide, **second, sampling=sampling))
    inputs = processor.inputs(first)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([more])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    (answer,) = reference.answers_to(
        inputs, use_audio_in_video=True, thinker_max_new_tokens=TEXT_TOKENS, talker_max_new_tokens=2
    )
    check(chunked_thinker, "second", answer)
    length = chunked_thinker.starts["first"].prompt_tokens
    assert answer.positions[:, :length].max() > answer.positions[:, length - 1].max()
    # All whole blocks of the first prompt and of the reply, whose last token was not computed.
    computed = length + len(reply) - 1
    assert chunked_thinker.usage("second").cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE > length


def test_it_is_found_where_they_are_the_same(chunked_thinker: ThinkerRig, wide: ThinkRequest) -> None:
    reply = chunked_thinker.text("first")
    chunked_thinker.run(resumed(wide, reply[:70]))
    assert chunked_thinker.text("resumed") == reply[70:]
    # What it did not find is a part of a block.
    assert chunked_thinker.steps.of("resumed")[0] <= BLOCK_SIZE


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
    assert thinker.usage("second").cached_tokens == 0


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
        assert thinker.usage(name).cached_tokens == 0
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


def test_an_error_of_vllms_that_nobody_expected_ends_its_own_request_alone(
    thinker: ThinkerRig, processor: Processor, answers: dict[str, Answer], caplog: pytest.LogCaptureFixture
) -> None:
    core = thinker.engine.engine_core
    add = core.add_request

    def add_or_break(request: EngineCoreRequest) -> None:
        if request.request_id.startswith("odd"):
            raise KeyError("no such modality")
        add(request)

    conversation = examples()["image, audio and text"]
    requests = [request_of(name, conversation, processor) for name in ("odd", "media")]
    thinker.accept(*requests)
    failures: dict[str, OmniRelayError] = {}
    with mock.patch.object(core, "add_request", add_or_break):
        while "odd" not in failures or not thinker.texts["media"]:
            thinker.wait()
            failures |= thinker.step()
    assert failures.keys() == {"odd"}
    assert isinstance(failures["odd"], StageFailedError)
    assert "no such modality" in str(failures["odd"])
    assert "Traceback" in caplog.text
    thinker.service.abort("odd")
    thinker.run()
    check(thinker, "media", answers["image, audio and text"])
    assert not thinker.engine.has_unfinished_requests()


def test_a_video_longer_than_what_is_encoded_at_once_is_heard(
    thinker: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    """13 s of 1872 tokens of pictures and 325 of sound."""
    assert thinker.scheduler.max_num_encoder_input_tokens == 2048
    video = Item("video", clip(seconds=13.0, rate=4, width=168, height=168, text="What do you see?"))
    asked = asks(video, "Say it.", use_audio_in_video=True)
    thinker.run(request_of("a", asked, processor))
    check(thinker, "a", expected(asked, processor, reference))


def large_video(
    name: str, processor: Processor, sound: bool = True, seconds: float = 2.0, seed: int = 0
) -> ThinkRequest:
    """288 tokens of pictures and 50 of sound in each 2 s."""
    film = clip(seconds=seconds, rate=4, width=168, height=168, text="What do you see?", seed=seed)
    return request_of(
        name, asks(Item("video", film), "Say it.", use_audio_in_video=sound), processor, max_tokens=3
    )


def test_a_video_too_large_to_be_encoded_with_its_sound_is_refused(
    thinker: ThinkerRig, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinker.scheduler, "max_num_encoder_input_tokens", 300)
    error = thinker.failure(large_video("a", processor))
    assert isinstance(error, MediaTooLargeError)
    assert "338 tokens" in str(error)
    thinker.run(large_video("b", processor, sound=False))
    assert len(thinker.text("b")) == 3


def test_a_request_for_which_there_is_never_room_fails_and_others_are_served(
    thinker: ThinkerRig, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.thinker.service.check_encodable", lambda *_: None)
    monkeypatch.setattr(thinker.scheduler, "encoder_cache_manager", EncoderCacheManager(300))
    thinker.service.accept(large_video("stuck", processor))
    thinker.service.accept(thinker_request("text", random_prompt(30), max_tokens=5))
    failures: dict[str, OmniRelayError] = {}
    while not failures:
        thinker.wait()
        failures = thinker.step()
    assert thinker.finished == ["text"]
    assert isinstance(failures["stuck"], StageFailedError)
    assert "no room" in str(failures["stuck"])
    thinker.service.abort("stuck")
    thinker.settle()
    assert thinker.steps.free_blocks == thinker.steps.blocks
    assert len(thinker.steps.scheduled) < 40


def test_videos_that_keep_room_at_the_encoders_from_each_other_are_computed_one_after_another(
    thinker: ThinkerRig, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In pieces, so that the pictures of both are encoded before the sound of either.
    monkeypatch.setattr(thinker.scheduler.scheduler_config, "long_prefill_token_threshold", 48)
    monkeypatch.setattr(thinker.scheduler, "encoder_cache_manager", EncoderCacheManager(600))
    asked = {name: large_video(name, processor, seconds=8.0, seed=seed) for seed, name in enumerate("ab")}
    thinker.run(*asked.values())
    assert thinker.steps.preemptions
    together = {name: thinker.text(name) for name in asked}
    thinker.forget()
    thinker.run(*asked.values())
    assert {name: thinker.text(name) for name in asked} == together


def test_prompts_and_media_of_another_salt_are_not_found(
    chunked_thinker: ThinkerRig, processor: Processor
) -> None:
    rig = chunked_thinker
    rig.engine.reset_prefix_cache()
    kinds: tuple[MediaKind, ...] = ("audio", "image")
    asked = request_of(
        "x", asks(Item("image", picture("png", 91)), Item("audio", spoken("wav", "Salt."))), processor
    )
    early = early_request("early", asked.prompt_token_ids[:-2], asked.media, cache_salt="key alice")
    rig.run(early)
    found, decoded = {}, {}
    for name, salt in (("alice", "key alice"), ("bob", "key bob"), ("nobody", None), ("again", "key bob")):
        metrics = rig.service._preparer.metrics
        before = sum(metrics.items[kind, "decoded"]._value.get() for kind in kinds)
        with encoder_calls(rig) as calls:
            rig.run(msgspec.structs.replace(asked, request_id=name, cache_salt=salt))
        usage = rig.usage(name)
        found[name] = usage.cached_tokens > 0
        after = sum(metrics.items[kind, "decoded"]._value.get() for kind in kinds)
        decoded[name] = after - before
        assert (calls["vision"] == 0) == found[name]
    assert found == {"alice": True, "bob": False, "nobody": False, "again": True}
    assert decoded == {"alice": 0, "bob": 2, "nobody": 2, "again": 0}
    assert len({tuple(rig.text(name)) for name in found}) == 1
