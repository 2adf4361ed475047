"""What streaming costs in likeness to offline synthesis: ``python -m benchmarks.chunks``.

A chunk does not see what lies beyond its look-ahead, so streamed speech differs from that of one chunk
with everything.  For each look-ahead and length of chunks: how far the spectra are apart, whether the
borders click, and how many codec tokens must be there before the first audio.
"""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.measure.checkpoints import ensure
from benchmarks.measure.results import mean

SECONDS: Final = 10.0
STREAMS: Final = 8
LOOK_AHEADS: Final = (0, 1, 2, 3)
MAX_BLOCKS: Final = (2, 8, 32)
DEFAULT: Final = (1, 8)
"""Look-ahead and longest chunk as they are configured by default."""
_HOP, _WINDOW, _MELS = 240, 1024, 80
_BORDER = 24
"""Samples to either side of a border, a millisecond."""

Samples = NDArray[np.float32]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One way of cutting.

    Attributes:
        look_ahead: Blocks.
        max_blocks: Of a chunk.
        distance_db: Mean absolute difference of the log-mel spectra, streamed to offline.
        border_db: The same in frames that touch a border between chunks.
        clicks: Share of borders where the second difference has more energy than in 99 of 100 places.
        clicks_offline: The same in the offline speech, which has no borders.
        first_codes: Codec tokens that the first chunk waits for.
    """

    look_ahead: int
    max_blocks: int
    distance_db: float
    border_db: float
    clicks: float
    clicks_offline: float
    first_codes: int


def log_mel(samples: Samples) -> NDArray[np.float64]:
    """Log-mel spectrogram in dB, [80, frames]; what lies 80 dB below the loudest is cut off."""
    from transformers import audio_utils  # noqa: PLC0415 - loads torch

    filters = audio_utils.mel_filter_bank(
        _WINDOW // 2 + 1, _MELS, 0.0, 12_000.0, 24_000, norm="slaney", mel_scale="slaney"
    )
    window = audio_utils.window_function(_WINDOW, "hann")
    mel: NDArray[np.float64] = audio_utils.spectrogram(
        samples.astype(np.float64), window, _WINDOW, _HOP, power=2.0, mel_filters=filters
    )
    return 10 * np.log10(np.maximum(mel, mel.max() * 1e-8))


def clicking(samples: Samples, borders: Sequence[int]) -> float:
    """Share of borders whose second difference is among the highest hundredth of all places."""
    energy = np.square(np.diff(samples, 2))
    around = np.convolve(energy, np.ones(2 * _BORDER), mode="same")
    limit = np.quantile(around, 0.99)
    return mean([float(around[border - 1] > limit) for border in borders])


def measure(engine: Any, streams: Sequence[Sequence[int]]) -> Iterator[Point]:
    """Cut the same streams in each way.

    Args:
        engine: Token2wav's.
        streams: Codec ids.
    """
    from services.token2wav.chunks import ChunkingConfig  # noqa: PLC0415 - after the environment is prepared

    offline = [_joined(_speak(engine, codes, ChunkingConfig(mode="offline"))) for codes in streams]
    spectra = [log_mel(each) for each in offline]
    for max_blocks in MAX_BLOCKS:
        for look_ahead in LOOK_AHEADS:
            chunking = ChunkingConfig(look_ahead_blocks=look_ahead, max_blocks=max_blocks)
            # Doubling from one block, so that the borders are the same in every run.
            sizes = [
                min(2**index, max_blocks) * engine.geometry.codes_per_block
                for index in range(max_blocks.bit_length())
            ]
            distances, at_borders, clicks, clicks_offline = [], [], [], []
            for codes, whole, spectrum in zip(streams, offline, spectra, strict=True):
                parts = _speak(engine, codes, chunking, sizes)
                borders = np.cumsum([len(part) for part in parts])[:-1].tolist()
                difference = np.abs(log_mel(_joined(parts)) - spectrum).mean(axis=0)
                distances.append(float(difference.mean()))
                at_borders.append(float(difference[[border // _HOP for border in borders]].mean()))
                clicks.append(clicking(_joined(parts), borders))
                clicks_offline.append(clicking(whole, borders))
            yield Point(
                look_ahead=look_ahead,
                max_blocks=max_blocks,
                distance_db=mean(distances),
                border_db=mean(at_borders),
                clicks=mean(clicks),
                clicks_offline=mean(clicks_offline),
                first_codes=(1 + look_ahead) * engine.geometry.codes_per_block,
            )


def _joined(parts: Sequence[Samples]) -> Samples:
    return np.concatenate(parts)


def _speak(engine: Any, codes: Sequence[int], chunking: Any, sizes: Sequence[int] = ()) -> list[Samples]:
    """The chunks of one stream."""
    from services.token2wav.stream import AudioStream, VoiceSettings  # noqa: PLC0415 - as above

    stream = AudioStream(VoiceSettings(seed=1, speaker="Chelsie"), chunking, engine.geometry, sizes)
    stream.extend(codes)
    stream.end()
    parts = []
    while (chunk := stream.next_chunk()) is not None:
        engine.submit_chunk("stream", chunk)
        while engine.has_work:
            for outcome in engine.step():
                if outcome.error is not None:
                    raise outcome.error
                parts.append(outcome.waveform.numpy())
        stream.accept_chunk()
    return parts


def table(points: Sequence[Point]) -> str:
    """The curve in Markdown."""
    head = (
        *("look-ahead, blocks", "longest chunk, blocks", "difference, dB", "at borders, dB"),
        *("clicks", "offline", "first audio after"),
    )
    lines = [f"| {' | '.join(head)} |", "| ---: " * len(head) + "|"]
    for each in points:
        star = " (default)" if (each.look_ahead, each.max_blocks) == DEFAULT else ""
        cells = (
            f"{each.look_ahead}{star}",
            str(each.max_blocks),
            f"{each.distance_db:.3f}",
            f"{each.border_db:.3f}",
            f"{100 * each.clicks:.0f}%",
            f"{100 * each.clicks_offline:.0f}%",
            f"{each.first_codes} codec tokens",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point], path: Path) -> None:
    """The curve as a picture: likeness against waiting."""
    import matplotlib as mpl  # noqa: PLC0415 - only this needs it

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - as above

    figure, axis = plt.subplots(figsize=(6, 4))
    for max_blocks in MAX_BLOCKS:
        curve = [each for each in points if each.max_blocks == max_blocks]
        axis.plot(
            [each.first_codes / 50 for each in curve],
            [each.distance_db for each in curve],
            "o-",
            label=f"chunks of at most {max_blocks} blocks",
        )
    chosen = next(each for each in points if (each.look_ahead, each.max_blocks) == DEFAULT)
    axis.annotate(
        "default", (chosen.first_codes / 50, chosen.distance_db), (8, 8), textcoords="offset points"
    )
    axis.set_xlabel("seconds of codec tokens before the first audio")
    axis.set_ylabel("difference to offline, dB")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(model: Path, directory: Path, name: str) -> None:
    """Measure, print and write the curve."""
    from shared.config import Token2WavConfig  # noqa: PLC0415 - the environment comes before torch
    from shared.vllm.environment import prepare_environment  # noqa: PLC0415 - as above

    prepare_environment(Token2WavConfig())
    from services.families.known import family_of, read_config  # noqa: PLC0415 - as above
    from services.token2wav.engine import build_token2wav  # noqa: PLC0415 - as above

    family = family_of(read_config(model)).token2wav()
    engine = build_token2wav(family, model, max_batch_frames=32_768, max_num_seqs=16)
    generator = random.Random(1)  # noqa: S311 - nothing secret
    count = round(SECONDS * 50)
    streams = [[generator.randrange(8192) for _ in range(count)] for _ in range(STREAMS)]
    points = list(measure(engine, streams))
    directory.mkdir(parents=True, exist_ok=True)
    text = table(points)
    (directory / f"{name}-chunks.md").write_text(text, encoding="utf-8")
    draw(points, directory / f"{name}-chunks.png")
    sys.stdout.write(text)
    sys.stdout.flush()
    # As a stage does: nothing depends on taking torch and vLLM down piece by piece.
    os._exit(0)


if __name__ == "__main__":
    import asyncio

    size = sys.argv[1] if len(sys.argv) > 1 else "small"
    main(asyncio.run(ensure(size)), Path("benchmarks/results"), size)
