"""An answer's echo interrupts nothing, and a user's speech over it does: real speech in simulated rooms.

``python -m tests.gateway.test_turns_echo [SCENES [FIRST_SEED [ECHO_DB,... [hard]]]]`` measures more of them;
``hard``: two voices of flite beside espeak-ng's, a loudspeaker that clips, pieces that come late.
"""

import asyncio
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.fairness.quota import MemoryBudget
from gateway.http.realtime.audio import Playback
from gateway.http.realtime.input_buffers import InputAudio
from gateway.http.realtime.turn_detection import ServerVad, TurnListener, VoicePool
from gateway.http.voice.echo import SentAnswer
from gateway.http.voice.vad import WINDOW_BYTES, WINDOW_SAMPLES, VoiceStream
from labs.training.data.synthesis import SynthesizerVoice, synthesize
from shared.config import MediaConfig
from tests.support.media import speech

RATE, PIECE_S = 24_000, 0.1
ANSWERS = (
    "Eight plus seven is fifteen, and that is all there is to say about it.",
    "It is a big purple triangle, and below it there are two small green circles.",
    "I am sorry, but I could not hear what you said; would you please say it again?",
    "The weather in Paris will be sunny tomorrow, with a light wind from the west.",
    "First boil the water, then add a spoon of salt, and wait for about ten minutes.",
    "Well... yes. That may be so. But nobody knows for sure why they left.",
)
USERS = (
    "No, wait, I meant something else.",
    "Please stop now.",
    "Hold on a moment.",
    "That is not what I asked for.",
    "Can you repeat the first part?",
)
CLIPPED = 0.15
"""Where a cheap loudspeaker clips; answers have peaks of 0.4."""
Samples = NDArray[np.float32]


class Heard(NamedTuple):
    """When the user spoke, and when a turn began, if one did."""

    spoke: float
    began: float | None

    @property
    def soon(self) -> bool:
        """Whether the user was heard within 0.5 s; the last piece takes its time, too."""
        return self.began is not None and self.spoke < self.began <= self.spoke + 0.5 + PIECE_S


@cache
def said(text: str, voice: str) -> Samples:
    """The text as a voice speaks it, without the silence around it: espeak-ng's, or one of flite."""
    samples = synthesize(SynthesizerVoice("flite", voice), text, RATE) if voice else speech(text, RATE)
    sound = np.flatnonzero(np.abs(samples) > 0.01)
    return np.asarray(samples[sound[0] : sound[-1]], np.float32)


def spoken(text: str, db: float, voice: str = "") -> Samples:
    """The text at a level."""
    samples = said(text, voice)
    return np.asarray(samples * 10 ** (db / 20) / np.sqrt(np.mean(samples**2)), np.float32)


def reverberant(samples: Samples, random: np.random.Generator) -> Samples:
    """In a room with a reverberation time of 0.15 to 0.35 s."""
    size = int(RATE * random.uniform(0.15, 0.35))
    room = random.normal(size=size) * np.exp(-6.9 * np.arange(size) / size) * 0.02
    room[0] += 1
    length = 1 << (samples.size + size).bit_length()
    wet = np.fft.irfft(np.fft.rfft(samples, length) * np.fft.rfft(room, length), length)
    return np.asarray(wet[: samples.size], np.float32)


def hear(
    seed: int, echo_db: float, user_db: float | None = None, hard: bool = False, mute_s: float = 0.0
) -> Heard:
    """What a session hears whose client plays an answer, up to 0.5 s late, with an echo and perhaps a user.

    In half the scenes the answer's last piece comes up to 0.3 s late, and the client stops meanwhile.

    Args:
        user_db: Level of the user, relative to the answer.
        hard: Further voices, a loudspeaker that clips, and a microphone whose pieces come late.
        mute_s: How long the client has sent nothing before, but for a first piece.
    """
    random = np.random.default_rng(seed)
    voices = ("slt" if seed % 2 else "", "rms" if seed % 3 else "") if hard else ("", "")
    text = ANSWERS[random.integers(len(ANSWERS))]
    answer = np.tile(spoken(text, -22, voices[0]), 2)[: 4 * RATE]
    latency, late = random.uniform(0, 0.5), random.choice([0, random.uniform(0, 0.3)])
    spoke = random.uniform(2.2, 3.7)
    cuts, starts = [0, RATE // 2, 2 * RATE, answer.size], [1.0, 1.5, 3 + late]
    played = np.zeros(7 * RATE, np.float32)
    pieces = [(at, answer[a:b]) for at, a, b in zip(starts, cuts[:-1], cuts[1:], strict=True)]
    for at, piece in pieces:
        played[int((at + latency) * RATE) :][: piece.size] = piece
    echo = reverberant(CLIPPED * np.tanh(played / CLIPPED) if hard else played, random)
    echo *= 10 ** (echo_db / 20) * np.sqrt(np.sum(played**2) / np.sum(echo**2))
    heard = echo + random.normal(size=echo.size).astype(np.float32) * 10 ** (-62 / 20)
    if user_db is not None:
        user = spoken(USERS[random.integers(len(USERS))], -22 + user_db, voices[1])
        heard[int(spoke * RATE) :][: user.size] += user
    data = (np.clip(heard, -1, 1) * 32767).astype("<i2").tobytes()
    jitter = random.uniform(0, 0.08 if hard else 0, len(data))
    return Heard(spoke, asyncio.run(_listened(data, pieces, jitter, mute_s)))


async def _listened(
    data: bytes, pieces: list[tuple[float, Samples]], jitter: NDArray[np.float64], mute_s: float
) -> float | None:
    now, waiting = [0.0], list(pieces)
    audio = InputAudio(MediaConfig(), MemoryBudget(2**30, lambda: 0).of("a"))
    clock: Any = mock.Mock(monotonic=lambda: now[0])
    # Only these two look at the time; a scene is heard as fast as it can be.
    playing = mock.patch("gateway.http.realtime.audio.time", clock)
    listening = mock.patch("gateway.http.realtime.turn_detection.time", clock)
    with playing, listening:
        playback = Playback()
        listener = TurnListener(ServerVad(), audio, VoicePool(), "a", lambda _: None, playback)
        size = int(2 * RATE * PIECE_S)
        if mute_s:
            await audio.append(bytes(size))
            assert [turn async for turn in listener.turns()] == []
        for at in range(0, len(data), size):
            now[0] = mute_s + (at + size) / (2 * RATE) + jitter[at]
            while waiting and mute_s + waiting[0][0] <= now[0]:
                playback.sent((waiting.pop(0)[1] * 32767).astype("<i2").tobytes())
            if not waiting:
                playback.finish()
            await audio.append(data[at : at + size])
            async for turn in listener.turns():
                if turn.change == "started":
                    return now[0] - mute_s
    return None


def test_silence_and_full_scale_are_no_trouble() -> None:
    """A microphone may be off, or clip; NumPy's warnings are errors here."""
    noise = np.random.default_rng(0).integers(-32768, 32767, RATE, endpoint=True).astype("<i2").tobytes()
    for answer in (bytes(2 * RATE), noise):
        for heard in (bytes(2 * RATE), noise):
            sent, stream = SentAnswer(1.0, ((0, answer),)), VoiceStream()
            for at in range(0, RATE - 4 * WINDOW_SAMPLES, 4 * WINDOW_SAMPLES):
                pcm = heard[2 * at : 2 * at + 4 * WINDOW_BYTES]
                assert all(np.isfinite(each.probability) for each in stream.windows(pcm, at, sent, at))


def test_what_cannot_be_heard_any_more_is_forgotten() -> None:
    playback = Playback()
    for _ in range(100):
        playback.sent(bytes(2 * RATE))
    now = playback.end - 100
    assert len(playback.answer(now + 0.5).pieces) == 1
    assert len(playback.answer(now + 50.6).pieces) == 3
    assert len(playback.answer(now + 103.6).pieces) == 0


def test_an_answer_is_heard_after_one_that_was_cut() -> None:
    playback, answer = Playback(), b"\1\0" * RATE
    for _ in range(3):
        playback.sent(bytes(2 * RATE))
    playback.stop()
    playback.sent(answer)
    assert [pcm for _, pcm in playback.answer(playback.end).pieces][1:] == [answer]


@pytest.mark.parametrize("echo_db", [-6, -12, -18, -30, -60])
def test_an_echo_is_no_turn(echo_db: float) -> None:
    assert [seed for seed in range(4) if hear(seed, echo_db).began is not None] == []


@pytest.mark.parametrize(("echo_db", "user_db"), [(-60, -10), (-18, -10), (-6, 0), (-6, -20)])
def test_speech_over_an_echo_is_one(echo_db: float, user_db: float) -> None:
    assert sum(hear(seed, echo_db, user_db).soon for seed in range(5)) >= 4


@pytest.mark.parametrize(
    ("seed", "echo_db", "user_db"),
    [(41, -6, 0), (42, -6, -10), (69, -12, -10), (74, -18, -20), (99, -30, -20)],
)
def test_a_user_who_begins_as_a_piece_comes_late_is_heard(seed: int, echo_db: float, user_db: float) -> None:
    assert hear(seed, echo_db, user_db).soon


@pytest.mark.parametrize(("seed", "echo_db"), [(1174, -12), (1184, -12), (47, -6)])
def test_an_echo_that_moves_by_a_few_samples_is_no_turn(seed: int, echo_db: float) -> None:
    assert hear(seed, echo_db).began is None


@pytest.mark.parametrize("mute_s", [0.7, 60.0])
def test_an_echo_is_no_turn_of_a_client_that_sent_nothing_for_a_while(mute_s: float) -> None:
    assert [seed for seed in range(4) if hear(seed, -12, mute_s=mute_s).began is not None] == []
    assert hear(0, -12, -10, mute_s=mute_s).soon


def main(scenes: int, first: int, levels: str, hard: bool) -> None:
    """Print how often echoes interrupt, and how often users do within 0.5 s and a piece."""
    seeds = range(first, first + scenes)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for echo_db in map(float, levels.split(",")):
            heard = {
                user_db: list(pool.map(partial(hear, echo_db=echo_db, user_db=user_db, hard=hard), seeds))
                for user_db in (None, 0, -10, -20)
            }
            false = sum(each.began is not None for each in heard.pop(None))
            soon = [sum(bool(each.soon) for each in found) for found in heard.values()]
            print(
                f"echo {echo_db:g} dB: {false} of {scenes} interrupt; users 0, -10, -20 dB: {soon}",
                flush=True,
            )


if __name__ == "__main__":
    arguments = sys.argv[1:] + ["20", "0", "-6,-12,-18,-30,-60", ""][len(sys.argv) - 1 :]
    main(int(arguments[0]), int(arguments[1]), arguments[2], arguments[3] == "hard")
