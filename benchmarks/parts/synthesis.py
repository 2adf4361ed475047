"""Token2wav alone: what a second of speech costs in streams of different lengths.

``python -m benchmarks.parts.synthesis MODEL SECONDS…`` measures, in a process of its own, and writes JSON.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.measure.machine import forget_peak, peak_memory
from benchmarks.measure.results import Synthesis
from benchmarks.measure.workload import CODEC_RATE, SEED, SPEAKER
from omnirelay.errors import OmniRelayError
from shared.messages import CodecTokens, Sampling, SpeechSettings, SynthesisStart

CODES: Final = 8192
"""Ids below are codes in every checkpoint of ours."""


async def measure_synthesis(model: Path, lengths: Sequence[float], repeats: int) -> list[Synthesis]:
    """Make speech of each length in a process with token2wav's service alone."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.parts.synthesis", str(model), str(repeats)),
        *map(str, lengths),
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    if process.returncode != 0:
        raise OmniRelayError(f"token2wav could not be measured: exit status {process.returncode}")
    return msgspec.json.decode(told.splitlines()[-1], type=list[Synthesis])


class _Sink:
    """Takes the place of the queue to the gateway."""

    def put(self, message: Any) -> int:
        """Drop a message."""
        return 0 if message is None else 1

    def stalls(self, _: str) -> bool:
        """Keep up with everything."""
        return False


def main(model: Path, repeats: int, lengths: Sequence[float]) -> list[Synthesis]:
    """Measure in this process."""
    from shared.config import Token2WavConfig  # noqa: PLC0415 - the environment comes before torch
    from shared.vllm.environment import prepare_environment  # noqa: PLC0415 - as above

    config = Token2WavConfig(http=None)
    prepare_environment(config)
    from services.families.known import family_of, read_config  # noqa: PLC0415 - as above
    from services.token2wav.service import Token2WavService  # noqa: PLC0415 - as above

    gateway: Any = _Sink()
    service = Token2WavService(family_of(read_config(model)).token2wav(), model, config, gateway)
    _speak(service, 1.0, "warm-up")
    results = []
    for length in lengths:
        forget_peak(os.getpid())
        seconds = [_speak(service, length, f"{length}/{repeat}") for repeat in range(repeats)]
        results.append(Synthesis(audio_s=length, seconds=seconds, peak_memory=peak_memory(os.getpid())))
    service.close()
    return results


def _speak(service: Any, length: float, name: str) -> float:
    """Make one stream whose codec tokens are all there; gives the seconds it took."""
    generator = random.Random(name)  # noqa: S311 - nothing secret
    codes = [generator.randrange(CODES) for _ in range(round(length * CODEC_RATE))]
    speech = SpeechSettings(
        speaker=SPEAKER,
        sampling=Sampling(max_tokens=len(codes)),
        seed=SEED,
        # The same work in every run; by the clock, cuts depend on how fast the machine is.
        chunk_frames=[12, 24, 48, 96],
    )
    started = time.perf_counter()
    service.accept(SynthesisStart(request_id=name, priority=0, speech=speech))
    service.accept(CodecTokens(request_id=name, seq=0, token_ids=codes, last=True))
    while service.active_requests():
        if failures := service.step():
            raise next(iter(failures.values()))
    return time.perf_counter() - started


if __name__ == "__main__":
    measured = main(Path(sys.argv[1]), int(sys.argv[2]), [float(each) for each in sys.argv[3:]])
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
    sys.stdout.flush()
    # As a stage does: nothing depends on taking torch and vLLM down piece by piece.
    os._exit(0)
