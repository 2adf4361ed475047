"""Beginnings of prompts that are computed while the user still speaks."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from omnirelay.errors import BusyError, InvalidRequestError, PromptTooLongError
from services.thinker.scheduler import EARLY_STEP_TOKENS
from services.thinker.service import MAX_EARLY
from shared.messages import MediaItem, ThinkRequest
from shared.messages.payloads import Blob
from tests.support.answers import Reference, random_prompt
from tests.support.camera import as_sent, frames, video_file
from tests.support.conversations import Conversation, Item, Processor, asks, expected
from tests.support.media import encode_audio, picture, speech
from tests.support.thinking import ThinkerRig, early_request, request_about, speech_of, thinker_request
from tests.thinker.conftest import BLOCK_SIZE
from tests.thinker.test_thinker_media import check, encoder_calls

RATE = 24_000
WORDS = "I would like to know what you think about the weather of tomorrow, and of the days that follow it."


def tone(count: int) -> NDArray[np.float32]:
    """So many samples, as loud as can be."""
    return (0.99 * np.sin(np.arange(count) * 2 * np.pi * 1000 / RATE)).astype(np.float32)


def recording(seconds: float, text: str = WORDS) -> bytes:
    """The beginning of what a user says, loudest at its start."""
    samples = np.tile(speech(text, RATE), 4)[: int(seconds * RATE)].copy()
    samples[:2400] = tone(2400)
    return encode_audio(samples, RATE, "wav")


def question(seconds: float, *before: Item) -> Conversation:
    return asks(*before, Item("audio", recording(seconds)))


def request_of(name: str, conversation: Conversation, processor: Processor) -> ThinkRequest:
    return request_about(name, conversation, processor, max_tokens=20)


def beginning_of(name: str, conversation: Conversation, processor: Processor) -> ThinkRequest:
    """The prompt up to its recording, as long as that goes on."""
    prompt = processor.prompt(conversation)
    going_on = processor._processor.tokenizer("<|AUDIO|><|VIDEO|>")["input_ids"]
    last = max(index for index, token in enumerate(prompt) if token in going_on)
    early = early_request(name, prompt[: last + 1], conversation.media, "recording")
    return msgspec.structs.replace(early, use_audio_in_video=conversation.use_audio_in_video)


def text_of(name: str, length: int) -> ThinkRequest:
    return early_request(name, random_prompt(length))


@pytest.fixture
def rig(chunked_thinker: ThinkerRig) -> ThinkerRig:
    chunked_thinker.engine.reset_prefix_cache()
    return chunked_thinker


def test_the_request_finds_all_but_the_last_window(
    rig: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    for seconds in (2.2, 4.3, 6.2, 8.2):
        rig.run(beginning_of(f"early{seconds}", question(seconds), processor))
    tokens = [usage.tokens for usage in rig.prefilled.values()]
    assert np.diff(tokens).tolist() == [50, 50, 50]
    computed = [usage.tokens - usage.cached_tokens for usage in rig.prefilled.values()]
    assert max(computed[1:]) < 50 + BLOCK_SIZE
    with encoder_calls(rig) as calls:
        rig.run(request_of("whole", question(9.0), processor))
    usage = rig.usage("whole")
    assert usage.cached_tokens == tokens[-1] // BLOCK_SIZE * BLOCK_SIZE
    # The last window; that before it is in the encoder cache, for its tokens beyond the last whole block.
    assert calls == {"audio": 1, "vision": 0}
    check(rig, "whole", expected(question(9.0), processor, reference))
    assert set(rig.texts) == set(rig.starts) == {"whole"}


def filmed(seconds: int, write: Callable[[Sequence[bytes], bytes], bytes] = as_sent) -> Conversation:
    """What a camera saw and heard; a frame of it is new each half second."""
    pcm = (32767 * np.tile(speech(WORDS, RATE), 4)[: seconds * RATE]).astype("<i2")
    pcm[:2400] = (32767 * tone(2400)).astype("<i2")
    film = write(frames(16)[: 2 * seconds], pcm.tobytes())
    return asks(Item("video", film), use_audio_in_video=True)


def test_what_a_camera_sees_is_computed_while_it_films(
    rig: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    for seconds in (1, 3, 5, 7):
        rig.run(beginning_of(f"early{seconds}", filmed(seconds), processor))
    tokens = [usage.tokens for usage in rig.prefilled.values()]
    first, *added = np.diff(tokens).tolist()
    assert first > added[0] == added[1] > 50
    assert rig.prefilled["early7"].cached_tokens > tokens[2] - 2 * BLOCK_SIZE
    with encoder_calls(rig) as calls:
        rig.run(request_of("whole", filmed(8), processor))
    assert rig.usage("whole").cached_tokens > tokens[3] - 2 * BLOCK_SIZE
    assert calls == {"audio": 1, "vision": 1}
    check(rig, "whole", expected(filmed(8, video_file), processor, reference))


def test_a_louder_moment_is_computed_anew(
    rig: ThinkerRig, processor: Processor, reference: Reference
) -> None:
    quiet = np.random.default_rng(3).normal(0, 1e-4, 5 * RATE).astype(np.float32)
    quiet[: 2 * RATE] += 0.01 * speech(WORDS, RATE)[: 2 * RATE]
    loud = np.concatenate([quiet, tone(2400)])
    begun, whole = (asks(Item("audio", encode_audio(each, RATE, "wav"))) for each in (quiet, loud))
    rig.run(beginning_of("early", begun, processor))
    rig.run(request_of("whole", whole, processor))
    usage = rig.usage("whole")
    assert usage.cached_tokens < 50 < rig.prefilled["early"].tokens
    check(rig, "whole", expected(whole, processor, reference))


def test_images_and_text_that_come_early_are_computed(rig: ThinkerRig, processor: Processor) -> None:
    image = Item("image", picture("png", 77))
    conversation = asks(image, "What is it?")
    request = request_of("whole", conversation, processor)
    rig.run(early_request("early", request.prompt_token_ids[:-8], conversation.media))
    with encoder_calls(rig) as calls:
        rig.run(request)
    assert calls == {"audio": 0, "vision": 0}
    usage = rig.usage("whole")
    assert usage.cached_tokens == rig.prefilled["early"].tokens // BLOCK_SIZE * BLOCK_SIZE > 0


def test_requests_come_first(rig: ThinkerRig) -> None:
    service = rig.service
    service.accept(text_of("early", 400))
    assert rig.step() == {}
    assert rig.scheduler.early_counts() == (1, 0)
    assert (service.load().running, service.load().waiting) == (0, 0)
    service.accept(thinker_request("a", random_prompt(100), max_tokens=5, priority=1000))
    while "a" not in rig.finished:
        assert rig.step() == {}
    assert rig.prefilled == {}
    assert rig.steps.preemptions["early"] == 1
    together = [step for step in rig.steps.scheduled if set(step) == {"a", "early"}]
    assert together == []
    rig.run()
    # What was computed before is found again.
    assert rig.prefilled["early"].cached_tokens in {0, 48 // BLOCK_SIZE * BLOCK_SIZE}
    assert sum(rig.steps.of("early")) <= 400 + 48


def test_it_gives_its_memory_to_requests(tight_thinker: ThinkerRig) -> None:
    rig = tight_thinker
    if not rig.engine.vllm_config.cache_config.enable_prefix_caching:
        assert rig.service.limits.prefills == 0
        with pytest.raises(BusyError):
            rig.service.accept(text_of("early", 280))
        return
    rig.service.accept(text_of("early", 280))
    rig.step()
    rig.service.accept(thinker_request("a", random_prompt(300), max_tokens=8))
    rig.run()
    assert rig.finished == ["a"]
    assert rig.steps.preemptions["a"] == 0
    assert "early" in rig.prefilled


def test_a_step_of_it_is_short(thinker: ThinkerRig) -> None:
    thinker.engine.reset_prefix_cache()
    thinker.run(text_of("early", 1200))
    assert max(thinker.steps.of("early")) <= EARLY_STEP_TOKENS
    thinker.run(thinker_request("a", random_prompt(1200, seed=9), max_tokens=1))
    assert max(thinker.steps.of("a")) > EARLY_STEP_TOKENS


def test_it_ends_without_a_trace(rig: ThinkerRig, processor: Processor) -> None:
    service = rig.service
    names = [f"early{at}" for at in range(MAX_EARLY)]
    for at, name in enumerate(names):
        service.accept(text_of(name, 200) if at % 2 else beginning_of(name, question(3.0), processor))
    with pytest.raises(BusyError):
        service.accept(text_of("one too many", 10))
    rig.step()
    assert set(service.active_requests()) == set(names)
    for name in names:
        service.abort(name)
    assert service.active_requests() == []
    rig.settle()
    assert service.load().held_bytes == 0
    assert rig.steps.free_blocks == rig.steps.blocks
    assert (rig.prefilled, rig.texts) == ({}, {})


def test_what_cannot_be_computed_is_refused(rig: ThinkerRig, processor: Processor) -> None:
    whole = beginning_of("early", question(3.0), processor)
    behind = msgspec.structs.replace(
        whole, request_id="behind", prompt_token_ids=[*whole.prompt_token_ids, 5]
    )
    with pytest.raises(InvalidRequestError, match="does not end with a recording"):
        rig.service.accept(behind)
    with pytest.raises(InvalidRequestError, match="has places for audio, but none came"):
        rig.service.accept(msgspec.structs.replace(whole, media=[]))
    with pytest.raises(InvalidRequestError, match="the prompt has places for"):
        rig.service.accept(msgspec.structs.replace(whole, media=2 * whole.media))
    with pytest.raises(InvalidRequestError, match="nothing is generated"):
        rig.service.accept(msgspec.structs.replace(whole, speech=speech_of()))
    with pytest.raises(PromptTooLongError):
        rig.service.accept(text_of("early", 3000))
    broken = msgspec.structs.replace(whole, media=[MediaItem(kind="audio", data=Blob(b"RIFF nothing"))])
    check_failed(rig, broken)


def check_failed(rig: ThinkerRig, early: ThinkRequest) -> None:
    """It fails once its media are prepared, of which nothing is left."""
    rig.service.accept(early)
    rig.step()
    rig.wait()
    assert list(rig.step()) == [early.request_id]
    rig.service.abort(early.request_id)
    assert rig.service.active_requests() == []
    assert rig.service.load().held_bytes == 0


def test_a_prompt_that_is_too_long_with_its_media_keeps_none_of_their_memory(
    rig: ThinkerRig, processor: Processor
) -> None:
    early = beginning_of("early", question(3.0), processor)
    most = rig.service.limits.max_positions
    words = [5] * (most - len(early.prompt_token_ids) - 10)
    check_failed(rig, msgspec.structs.replace(early, prompt_token_ids=[*words, *early.prompt_token_ids]))


def test_a_recording_shorter_than_a_window_leaves_what_is_before_it(
    rig: ThinkerRig, processor: Processor
) -> None:
    early = beginning_of("early", question(1.0), processor)
    rig.run(early)
    assert rig.prefilled["early"].tokens == len(early.prompt_token_ids) - 1
