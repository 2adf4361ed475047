"""The user of the programs that hold a conversation."""

import asyncio
import wave
from pathlib import Path

import numpy as np

from tests.clients.programs.conversation import PIECE_BYTES, RATE, User, question

DELAY_S = 0.1
ANSWER_S = 3.0
SPEECH = b"\1\1" * (RATE // 2)


async def answering(user: User, stops: bool) -> None:
    """Answer a while after each question; with ``stops`` fall silent when there is speech."""
    heard = False
    async for piece in user.microphone():
        if any(piece):
            heard = True
            if stops and user.left_s:
                user.stop()
        elif heard:
            heard = False
            await asyncio.sleep(DELAY_S)
            user.hear(ANSWER_S)
            user.end()


def conversation(questions: int, stops: bool) -> User:
    async def converse() -> User:
        user = User([SPEECH] * questions)
        client = asyncio.create_task(answering(user, stops))
        await user.converse()
        client.cancel()
        return user

    return asyncio.run(converse())


def test_a_user_interrupts_the_first_answer() -> None:
    user = conversation(2, stops=True)
    assert len(user.first_audio_s) == 2
    assert all(seconds >= DELAY_S for seconds in user.first_audio_s)
    assert user.stopped == 1
    assert 0 <= user.stopped_s[0] <= len(SPEECH) / 2 / RATE


def test_an_answer_that_goes_on_is_not_stopped() -> None:
    user = conversation(2, stops=False)
    assert (user.stopped, user.stopped_s) == (0, [])
    assert len(user.first_audio_s) == 2


def test_a_recording_begins_and_ends_with_its_speech(tmp_path: Path) -> None:
    path = tmp_path / "question.wav"
    silence, speech = np.zeros(8000, np.int16), np.full(16_000, 1000, np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.concatenate([silence, speech, silence]).tobytes())
    samples = np.frombuffer(question(str(path)), np.int16)
    assert abs(len(samples) - RATE) < PIECE_BYTES
    assert set(samples.tolist()) == {1000}
