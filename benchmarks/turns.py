"""Turns cut in the middle, and the wait after their end: ``semantic_vad`` by silence and by Smart Turn.

``python -m benchmarks.turns --help``; docs/adr/0044 has the figures.  Needs flite, espeak-ng, onnxruntime and
the weights (``pip install --no-deps pipecat-ai``).
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Final

import numpy as np

from benchmarks.measure.results import percentile, tell
from gateway.fairness.memory_budget import MemoryBudget
from gateway.http.realtime.input.audio import InputAudio
from gateway.http.realtime.items import BYTES_PER_S
from gateway.http.realtime.turns.end import EndDetector
from gateway.http.realtime.turns.listener import TurnListener, VoicePool
from gateway.http.realtime.turns.playback import Playback
from gateway.http.realtime.turns.rules import SemanticVad
from gateway.http.realtime.turns.silero import Floats
from gateway.http.realtime.turns.smart_turn import SmartTurn, installed_weights
from gateway.http.realtime.turns.stream import WINDOW_BYTES
from labs.training.data.synthesis import SAMPLE_RATE, SynthesizerVoice, synthesize
from omnirelay.errors import OmniRelayError
from shared.config import MediaConfig

VOICES: Final = [SynthesizerVoice("flite", each) for each in ("slt", "rms", "awb")] + [
    SynthesizerVoice("espeak", each) for each in ("en-us", "en-gb+f3", "en-us+m3")
]
WITH_PAUSE: Final = (
    "When I get home from work, I would like a cup of tea.",
    "Please call my sister, and tell her that I am late.",
    "If it rains tomorrow, we can go to the museum.",
    "I was thinking about the red one, but the blue one is cheaper.",
    "My number is four two seven, one nine three five.",
    "Can you look up the weather, and tell me what to wear?",
    "After the meeting on Monday, send the notes to everybody.",
    "I need three eggs, some flour, and a little butter.",
    "The train leaves at nine, so I have to get up early.",
    "Is there a doctor nearby, who is open on Sundays?",
    "Set an alarm for seven, and another one for eight.",
    "Well, to be honest, I do not know what happened.",
)
"""Turns with a pause at the comma."""
WITHOUT: Final = (
    "What is the capital of France?",
    "Turn off the light in the kitchen.",
    "I think that is all for today.",
    "Yes, please.",
    "How old are you?",
    "Stop.",
)
"""Turns without a pause."""
PAUSES_S: Final = (0.3, 0.5, 0.8, 1.1, 1.5)
NOISES_DB: Final = (None, 20, 10)
"""Noise below the speech; none for silence."""
LOUD: Final = 0.01
LEVEL: Final = 0.05
BEFORE_S, BEHIND_S = 1.0, 6.0


@dataclass
class Outcome:
    """What became of the turns of one kind.

    Attributes:
        cut: Turns that ended in their pause.
        lost: Turns that did not end at all, or never began.
        waits_s: From the end of speech until the turn ended, of the others.
    """

    turns: int = 0
    cut: int = 0
    lost: int = 0
    waits_s: list[float] = field(default_factory=list)

    def add(self, ends: list[float], spoken: list[tuple[float, float]]) -> None:
        """Count a recording: when turns ended in it, and when something was said."""
        self.turns += 1
        last = spoken[-1][1]
        self.cut += any(end < spoken[-1][0] for end in ends)
        waits = [end - last for end in ends if end >= last - 0.2]
        self.lost += not waits
        self.waits_s += waits[-1:]

    def __str__(self) -> str:
        waits = self.waits_s or [float("nan")]
        return f"{self.cut} of {self.turns} | {self.lost} | {mean(waits):.2f} | {percentile(waits, 0.9):.2f}"


def recordings(pauses: bool) -> Iterator[tuple[list[Floats], float]]:
    """What each voice says before and after a pause, and its length; without pauses, one piece each."""
    lengths = cycle(PAUSES_S)
    for voice, text in product(VOICES, WITH_PAUSE if pauses else WITHOUT):
        said = synthesize(voice, text)
        loud = np.flatnonzero(np.abs(said) > LOUD)
        said = said[loud[0] : loud[-1]]
        yield (in_two(said), next(lengths)) if pauses else ([said], 0.0)


def in_two(said: Floats) -> list[Floats]:
    """Divide a sentence where it is silent for the longest time, without that silence."""
    loud = np.flatnonzero(np.convolve(np.abs(said), np.full(240, 1 / 240), "same") > LOUD)
    inner = loud[(loud > 0.15 * said.size) & (loud < 0.9 * said.size)]
    at = int(np.argmax(np.diff(inner)))
    return [said[: inner[at]], said[inner[at + 1] :]]


def recording(
    pieces: list[Floats], pause_s: float, noise_db: float | None
) -> tuple[bytes, list[tuple[float, float]]]:
    """A recording, int16, and when each piece begins and ends in it, in seconds."""
    level = LEVEL / np.sqrt(np.mean(np.concatenate(pieces) ** 2))
    parts, spoken, at = (
        [np.zeros(int(BEFORE_S * SAMPLE_RATE), np.float32)],
        list[tuple[float, float]](),
        BEFORE_S,
    )
    for piece in pieces:
        spoken.append((at, at + piece.size / SAMPLE_RATE))
        parts += [level * piece, np.zeros(int(pause_s * SAMPLE_RATE), np.float32)]
        at = spoken[-1][1] + pause_s
    parts.append(np.zeros(int(BEHIND_S * SAMPLE_RATE), np.float32))
    samples = np.concatenate(parts)
    if noise_db is not None:
        samples += LEVEL * 10 ** (-noise_db / 20) * pink_noise(samples.size)
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes(), spoken


def pink_noise(count: int) -> Floats:
    """Noise with as much power in each octave, of level 1; always the same."""
    spectrum = np.fft.rfft(np.random.default_rng(1).normal(size=count))
    spectrum[1:] /= np.sqrt(np.arange(1, spectrum.size))
    spectrum[: 50 * count // SAMPLE_RATE] = 0
    noise = np.fft.irfft(spectrum, count)
    return np.asarray(noise / np.sqrt(np.mean(noise**2)), np.float32)


async def ends_of(pcm: bytes, pool: VoicePool, rules: SemanticVad) -> list[float]:
    """When turns end, in seconds of the recording, without the time that it takes to hear."""
    audio = InputAudio(MediaConfig(), MemoryBudget(2**30, lambda: 0).of("measured"))
    listener = TurnListener(rules, audio, pool, "measured", lambda _: None, Playback())
    found = []
    for at in range(0, len(pcm), WINDOW_BYTES):
        audio.append(pcm[at : at + WINDOW_BYTES])
        async for turn in listener.turns():
            if turn.change == "stopped":
                found.append((at + WINDOW_BYTES) / BYTES_PER_S)
                audio.drop(turn.position)
    return found


async def compare(rules: SemanticVad, pools: dict[str, VoicePool]) -> None:
    """Write a table of both ways, with pauses and without, in each noise."""
    print("| | noise | way | cut in the pause | not ended | mean wait, s | of 90% at most |")  # noqa: T201
    print("|---|---|---|---|---|---|---|")  # noqa: T201
    for pauses in (True, False):
        said = list(recordings(pauses))
        for noise_db, (way, pool) in product(NOISES_DB, pools.items()):
            outcome = Outcome()
            for pieces, pause_s in said:
                pcm, spoken = recording(pieces, pause_s, noise_db)
                outcome.add(await ends_of(pcm, pool, rules), spoken)
            noise = "none" if noise_db is None else f"{noise_db} dB"
            print(f"| {'pause' if pauses else 'no pause'} | {noise} | {way} | {outcome} |", flush=True)  # noqa: T201


async def listen(sessions: int, pools: dict[str, VoicePool], seconds: float) -> None:
    """Write what sessions cost that hear speech with pauses all the time, as it is spoken."""
    said = [
        recording(pieces, pause_s, 20)[0][: -int(BEHIND_S - 1.5) * BYTES_PER_S]
        for pieces, pause_s in recordings(True)
    ]

    async def session(number: int, pool: VoicePool) -> None:
        pcm = b"".join(said[(number + each) % len(said)] for each in range(1 + int(seconds // 5)))
        audio = InputAudio(MediaConfig(), MemoryBudget(2**30, lambda: 0).of(str(number)))
        listener = TurnListener(SemanticVad(), audio, pool, str(number), lambda _: None, Playback())
        began = time.monotonic() + number / sessions / 10
        for at in range(0, int(seconds * 10)):
            await asyncio.sleep(began + at / 10 - time.monotonic())
            audio.append(pcm[at * BYTES_PER_S // 10 : (at + 1) * BYTES_PER_S // 10])
            async for turn in listener.turns():
                if turn.change == "stopped":
                    audio.drop(turn.position)

    for way, pool in pools.items():
        verdicts.clear()
        begun, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(session(number, pool) for number in range(sessions)))
        cores = (time.process_time() - cpu) / (time.monotonic() - begun)
        tell(f"{way}: {sessions} sessions, {cores:.2f} cores, verdicts: {dict(Counter(verdicts))}")


verdicts: Final[list[str]] = []


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="file of Smart Turn v3; default: of an installed pipecat-ai"
    )
    parser.add_argument("--eagerness", default="auto", choices=("low", "medium", "high", "auto"))
    parser.add_argument(
        "--sessions", type=int, default=0, metavar="N", help="measure the cost of N sessions instead"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="for so long")
    options = parser.parse_args()
    try:
        network = SmartTurn(options.model or installed_weights())
        hears = EndDetector(network, verdicts.append, lambda _: None)
        pools = {"silence": VoicePool(), "Smart Turn": VoicePool(hears)}
        if options.sessions:
            asyncio.run(listen(options.sessions, pools, options.seconds))
        else:
            asyncio.run(compare(SemanticVad(eagerness=options.eagerness), pools))
    except OmniRelayError as error:
        tell(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
