"""Earlier spoken answers, named by the id of their audio."""

from typing import Any

import openai
import pytest

from gateway.http.openai.chat import MAX_SPOKEN_BYTES as MOST_BYTES
from gateway.http.openai.kept_answers import ENTRY_BYTES, KEPT_S, KeptAnswers
from tests.gateway.http_bench import HttpBench, cut, melody, speaking

ANSWER = "How are you? 😀"
CHUNKS = cut(melody(0.3), [4800])
HI: Any = {"role": "user", "content": "Hi"}
SPOKEN: dict[str, Any] = {
    "model": "omnirelay",
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "pcm16"},
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def spoken(audio_id: str) -> Any:
    return {"role": "assistant", "audio": {"id": audio_id}}


async def whole(b: HttpBench) -> tuple[str, int]:
    answer = await b.ai.chat.completions.create(messages=[HI], **SPOKEN)
    audio = answer.choices[0].message.audio
    assert audio is not None
    assert audio.expires_at - answer.created in {KEPT_S, KEPT_S + 1, KEPT_S + 2}
    return audio.id, audio.expires_at


async def streamed(b: HttpBench) -> str:
    names = set()
    async for chunk in await b.ai.chat.completions.create(messages=[HI], stream=True, **SPOKEN):
        if chunk.choices and (audio := getattr(chunk.choices[0].delta, "audio", None)):
            names.add(audio.id)
    (name,) = names
    return str(name)


async def test_an_answer_is_what_the_assistant_said(web: HttpBench) -> None:
    """The prompt is the same as with the answer's text."""

    async with speaking(web, ANSWER, CHUNKS):
        for name in ((await whole(web))[0], await streamed(web)):
            said: Any = {"role": "assistant", "content": ANSWER}
            for earlier in (spoken(name), said):
                await web.ai.chat.completions.create(messages=[HI, earlier, HI], **SPOKEN)
            named, written = web.stages.requests[-2:]
            assert named.prompt_token_ids == written.prompt_token_ids


async def test_an_answer_that_is_not_kept_is_named(web: HttpBench) -> None:
    async with speaking(web, ANSWER, CHUNKS):
        for name in ("audio_1", "x" * 100_000):
            with pytest.raises(openai.BadRequestError) as caught:
                await web.ai.chat.completions.create(messages=[HI, spoken(name), HI], **SPOKEN)
            assert caught.value.param == "messages[1].audio"
            assert "send its transcript" in str(caught.value)


def test_an_answer_is_kept_for_its_client_and_its_time() -> None:
    clock = Clock()
    answers = KeptAnswers[str](MOST_BYTES, clock)
    assert answers.keep("a", "audio_1", "Hello", len("Hello")) == 1000 + KEPT_S
    assert answers.get("a", "audio_1") == "Hello"
    assert answers.get("b", "audio_1") is None
    clock.now += KEPT_S
    assert answers.get("a", "audio_1") is None
    answers.keep("b", "audio_2", "", len(""))
    assert list(answers._kept) == ["audio_2"]
    assert answers._quota.used == ENTRY_BYTES


def test_a_client_that_fills_the_room_loses_its_own_oldest_answers() -> None:
    answers = KeptAnswers[str](MOST_BYTES, Clock())
    answers.keep("other", "first", "kept", len("kept"))
    text = "x" * 9_488
    for number in range(1000):
        assert answers.keep("a", f"audio_{number}", text, len(text)) == 1000 + KEPT_S
    assert answers._quota.used <= MOST_BYTES
    assert answers.get("other", "first") == "kept"
    assert answers.get("a", "audio_0") is None
    assert answers.get("a", "audio_999") == text
    assert answers.keep("new", "theirs", "Hello", len("Hello")) == 1000 + KEPT_S


def test_an_answer_for_which_there_is_no_room_expires_at_once() -> None:
    answers = KeptAnswers[str](MOST_BYTES, Clock())
    answers.keep("a", "audio_1", "Hello", len("Hello"))
    assert answers.keep("a", "audio_2", "x" * MOST_BYTES, len("x" * MOST_BYTES)) == 1000
    assert answers.get("a", "audio_2") is None
    assert answers.get("a", "audio_1") == "Hello"
