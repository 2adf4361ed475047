"""Texts that the trained checkpoint reads aloud."""

import numpy as np
import pytest

from benchmarks.quality.__main__ import Listening
from labs.training.data import world
from labs.training.measure.recognizer import word_errors
from omnirelay import AsyncClient, AudioEvent, Client
from omnirelay.client.types import TimedDoneEvent
from omnirelay.reading import LEAST
from omnirelay.values import SAMPLE_RATE
from tests.support.restarting import RestartingStack

pytestmark = [pytest.mark.quality, pytest.mark.timeout(900)]

LINES = [fact.reply for fact in world.FACTS if fact.is_held_out and len(fact.reply) >= LEAST][:96:8]
MOST_WORD_ERROR = 0.10
"""Of sums that are right; texts of other kinds are in `make quality`."""
MOST_SILENCE_S = 0.8
LOUD = 0.02


@pytest.mark.parametrize("question", ["What is two plus two?", "What is sixteen minus five?", "Good morning"])
def test_the_models_own_answer_is_spoken_as_it_speaks_it(stack: RestartingStack, question: str) -> None:
    """That the text was given, not written, changes no code."""
    with Client(stack.address) as client:
        answered = client.chat(question, seed=3).result()
        said = client.chat(question, seed=3, say=answered.text).result()
    assert said.text == answered.text
    assert said.done.codec_token_ids == answered.done.codec_token_ids


async def test_a_long_text_is_read_without_a_seam(stack: RestartingStack) -> None:
    text = "\n".join(LINES)
    hear, speech, errors = Listening().hear, [], 0
    async with AsyncClient(stack.address) as client:
        pieces: list[bytes] = []
        async for event in client.speak(text, seed=1):
            if isinstance(event, AudioEvent):
                pieces.append(event.pcm)
            elif isinstance(event, TimedDoneEvent):
                wave = np.frombuffer(b"".join(pieces), np.float32)
                errors += word_errors(event.text, hear(wave))
                speech.append(wave)
                pieces = []
    assert len(speech) == len(LINES)
    assert errors <= MOST_WORD_ERROR * len(text.split())
    whole = np.concatenate(speech)
    frame = SAMPLE_RATE // 100
    loud = np.abs(whole[: len(whole) // frame * frame]).reshape(-1, frame).max(axis=1) > LOUD
    gaps = np.diff(np.flatnonzero(loud)) / 100
    assert gaps.max() <= MOST_SILENCE_S
    borders = np.cumsum([len(wave) for wave in speech])[:-1]
    jumps = np.abs(np.diff(whole))
    assert jumps[borders - 1].max() < np.quantile(jumps, 0.99)
