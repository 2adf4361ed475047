"""Sounds, pictures and videos through the whole stack: transformers' answers, and bad files harm nobody."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from omnirelay import (
    Answer,
    AudioPart,
    ChatMessage,
    ChatResult,
    Client,
    GenerateRequest,
    ImagePart,
    SamplingOverrides,
    TextPart,
    VideoPart,
)
from omnirelay.content import ContentPart
from omnirelay.errors import MediaError
from shared.messages import MediaKind
from tests.support.answers import Answer as Expected
from tests.support.answers import Reference
from tests.support.conversations import Conversation, Item, Processor, asks, examples, to_be_spoken
from tests.support.media import clip, picture, spoken
from tests.support.stack import RunningStack

TEXT_TOKENS = 16
CODEC_TOKENS = 40
SEED = 5
PARTS: dict[MediaKind, Callable[..., ContentPart]] = {
    "audio": AudioPart,
    "image": ImagePart,
    "video": VideoPart,
}


def request_of(conversation: Conversation, codec_tokens: int = CODEC_TOKENS) -> GenerateRequest:
    return GenerateRequest(
        messages=[
            ChatMessage(
                turn.role,
                [
                    TextPart(part) if isinstance(part, str) else PARTS[part.kind](data=memoryview(part.data))
                    for part in turn.parts
                ],
            )
            for turn in conversation.turns
        ],
        use_audio_in_video=conversation.use_audio_in_video,
        speaker="Ethan",
        streaming=False,
        text_sampling=SamplingOverrides(max_tokens=TEXT_TOKENS, temperature=0.0),
        codec_sampling=SamplingOverrides(max_tokens=codec_tokens, temperature=0.0),
        seed=SEED,
    )


def ask(client: Client, conversation: Conversation) -> Answer:
    return client.chat(request_of(conversation))


def expected(conversation: Conversation, processor: Processor, reference: Reference) -> Expected:
    (answer,) = reference.answers_to(
        processor.inputs(to_be_spoken(conversation)),
        use_audio_in_video=conversation.use_audio_in_video,
        thinker_max_new_tokens=TEXT_TOKENS,
        talker_max_new_tokens=CODEC_TOKENS,
    )
    return answer


def check(result: ChatResult, answer: Expected) -> None:
    assert result.done.prompt_tokens == len(answer.prompt)
    assert result.done.text_token_ids == answer.text
    assert result.done.codec_token_ids == answer.codes


@pytest.fixture(scope="module")
def answers(processor: Processor, reference: Reference) -> dict[str, Expected]:
    return {name: expected(each, processor, reference) for name, each in examples().items()}


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[Client]:
    with Client(stack.address) as connected:
        yield connected


@pytest.mark.parametrize("name", examples())
def test_text_and_codec_tokens_are_transformers(
    client: Client, answers: dict[str, Expected], name: str
) -> None:
    check(ask(client, examples()[name]).result(), answers[name])


def test_the_waveform_too(client: Client, answers: dict[str, Expected], reference: Reference) -> None:
    name = "image, audio and text"
    result = ask(client, examples()[name]).result()
    waveform = reference.waveform(answers[name].codes, speaker="Ethan", seed=SEED).numpy()
    assert result.audio.shape == waveform.shape
    assert np.abs(result.audio - waveform).max() < 1e-4


BAD: dict[str, Item] = {
    "a truncated flac": Item("audio", spoken("flac")[:-4_000]),
    "a truncated png": Item("image", picture("png", 1)[:-2_000]),
    "a truncated mp4": Item("video", clip("mp4")[:-5_000]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name_and_harms_no_other(
    client: Client, answers: dict[str, Expected], name: str
) -> None:
    """All that files can lack is in ``tests/thinker/test_media_*.py``."""
    good, bad = Item(BAD[name].kind, good_file(BAD[name].kind)), BAD[name]
    other = ask(client, examples()["image"])
    with pytest.raises(MediaError, match=rf"^{bad.kind} 2: "):
        ask(client, asks(good, bad, "What is this?")).result()
    check(other.result(), answers["image"])


def good_file(kind: MediaKind) -> bytes:
    return {"audio": spoken("wav"), "image": picture("png", 1), "video": clip("mp4")}[kind]
