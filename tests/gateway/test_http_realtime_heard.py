"""Which words of an answer are kept when its speech is cut."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.realtime.speech import CHARACTER_MS, SentSpeech
from shared.messages import SAMPLE_RATE

TEXT = "one two three four"


def sound(ms: int, loud: bool = True) -> bytes:
    wave = np.sin(np.arange(ms * SAMPLE_RATE // 1000) / 20) * (8000 if loud else 30)
    return wave.astype("<i2").tobytes()


def speech(*pieces: bytes, complete: bool, speed: float = 1.0) -> SentSpeech:
    sent = SentSpeech(speed)
    for piece in pieces:
        sent.push(piece)
    sent.complete = complete
    return sent


@pytest.mark.parametrize(
    ("ms", "heard"),
    [
        (0, ""),
        (500, ""),
        (640, "one"),
        (1100, "one two"),
        (1600, "one two three"),
        (2000, TEXT),
        (3000, TEXT),
    ],
)
def test_silence_around_the_words_is_not_of_them(ms: int, heard: str) -> None:
    """18 characters and a pause take 1.52 s: 80 ms each."""
    sent = speech(sound(400, False), sound(1520), sound(1080, False), complete=True)
    assert sent.cut(TEXT, ms) == heard
    assert sent.ms == ms


def test_text_ahead_of_the_speech_is_not_kept() -> None:
    """Of a cancelled answer the text is there, and its speech is not."""
    ten = " ".join(["words"] * 10)
    sent = speech(sound(1000), complete=False)
    # Six characters a word.
    assert len(sent.cut(ten, 1000).split()) == round(1000 / (6 * CHARACTER_MS))
    faster = speech(sound(1000), complete=False, speed=1.5)
    assert len(faster.cut(ten, 1000).split()) == round(1500 / (6 * CHARACTER_MS))


def test_an_answer_may_be_cut_twice() -> None:
    sent = speech(sound(1520), complete=True)
    once = sent.cut(TEXT, 1200)
    assert once == "one two three"
    assert sent.cut(once, 1200) == once
    assert sent.cut(once, 350) == "one"


def test_a_text_without_spaces_is_cut_between_its_characters() -> None:
    sent = speech(sound(1000), complete=True)
    assert sent.cut("今天天气很好", 500) == "今天天"


@pytest.mark.parametrize("pcm", [b"", sound(5), sound(400, False), bytes(48_000)], ids=len)
def test_speech_that_says_nothing(pcm: bytes) -> None:
    sent = speech(pcm, complete=True)
    assert sent.cut("", sent.ms) == ""
    assert sent.cut(TEXT, 0) in ("", TEXT)


@given(
    text=st.text(max_size=80),
    sizes=st.lists(st.integers(0, 4000), max_size=8),
    share=st.floats(0, 1),
    complete=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_a_beginning_and_grows_with_time(
    text: str, sizes: list[int], share: float, complete: bool
) -> None:
    def kept(part: float, pieces: list[bytes]) -> str:
        sent = speech(*pieces, complete=complete)
        return sent.cut(text, int(part * sent.ms))

    pcm = sound(1000)[: 2 * sum(sizes)]
    borders = [0, *np.cumsum(sizes).tolist()]
    pieces = [pcm[2 * a : 2 * b] for a, b in itertools.pairwise(borders)]
    heard = kept(share, pieces)
    assert text.startswith(heard)
    assert heard == kept(share, [pcm])
    assert kept(share / 2, pieces) == heard[: len(kept(share / 2, pieces))]
