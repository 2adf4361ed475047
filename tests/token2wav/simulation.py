"""One stream through planner and pace on a clock that is set; and what given cuts, or the best ones, cost."""

import math
from collections.abc import Callable, Iterator, Sequence

from services.token2wav.chunks import ChunkPlanner, CodecGeometry
from services.token2wav.pace import Pace
from shared.config import SynthesisConfig, Token2WavConfig

GEOMETRY = CodecGeometry(block_size=24, repeats=2, max_frames=2400, unit_samples=240)
BLOCK = GEOMETRY.codes_per_block
FRAME_S = 0.02
MARGIN_S = Token2WavConfig().playback_margin_s
Cost = Callable[[int], float]


def simulate(
    arrivals: Sequence[float],
    cost: Cost,
    *,
    margin_s: float = MARGIN_S,
    pace: Pace | None = None,
    config: SynthesisConfig | None = None,
    sizes: Sequence[int] = (),
) -> list[tuple[float, int]]:
    """When each chunk was made, and its codec frames.

    Args:
        arrivals: When each codec frame comes; the end of the stream comes with the last one.
        cost: Seconds that a chunk of so many codec frames takes.
        margin_s: See :class:`Pace`.
        pace: With what it has learnt before.
        config: How the stream is cut.
        sizes: Sizes given with the request.
    """
    config = config or SynthesisConfig()
    pace = pace or Pace(config.look_ahead_blocks, GEOMETRY.block_s, margin_s)
    planner = ChunkPlanner(config, GEOMETRY, sizes)
    now = due = cut_at = 0.0
    made: list[tuple[float, int]] = []

    def pick(possible: Sequence[int], may_wait: bool) -> int:
        nonlocal cut_at
        blocks, cut_at = pace.choose(possible, may_wait, due, now)
        return blocks

    while not planner.finished:
        received = sum(arrival <= now for arrival in arrivals)
        cut_at = math.inf
        plan = planner.next_plan(received, received == len(arrivals), pick)
        if plan is None:
            now = min([cut_at, *arrivals[received : received + 1]])
            assert now < math.inf or planner.finished
            continue
        frames = plan.target_end - plan.start
        blocks = -(-frames // BLOCK)
        if pace.is_urgent(due - pace.expected(blocks), now):
            pace.observe(blocks, cost(frames))
        now += cost(frames)
        made.append((now, frames))
        due = max(due, now) + frames * FRAME_S
    return made


def as_soon_as_can_be(
    arrivals: Sequence[float], cuts: Sequence[int], cost: Cost, look_ahead: int = BLOCK
) -> list[tuple[float, int]]:
    """When each chunk of a stream was made that was cut as soon as it could be, and its codec frames.

    Args:
        arrivals: When each codec frame becomes available.
        cuts: Frames of the chunks; together they are the stream.
        cost: Of synthesis.
        look_ahead: Frames after a chunk, other than the last, that it waits for.
    """
    pieces, end, made = [], 0, 0.0
    for frames in cuts:
        end += frames
        made = max(made, _ready(arrivals, end, look_ahead)) + cost(frames)
        pieces.append((made, frames))
    return pieces


def growing(frames: int, sizes: Sequence[int], look_ahead: int = BLOCK) -> list[int]:
    """Cut a stream by a schedule whose last size repeats.

    What is left at the end without a look-ahead behind it joins the last chunk.
    """
    cuts: list[int] = []
    left = frames
    while left:
        size = sizes[min(len(cuts), len(sizes) - 1)]
        cuts.append(size if left >= size + max(look_ahead, 1) else left)
        left -= cuts[-1]
    return cuts


def least_silence(
    arrivals: Sequence[float], cost: Cost, *, longest: int = 8 * BLOCK, look_ahead: int = BLOCK
) -> float:
    """The least silence that any cuts at blocks could have, whose first chunk is one block at once.

    Args:
        arrivals: As in :func:`as_soon_as_can_be`.
        cost: Of synthesis.
        longest: Frames of the longest chunk.
        look_ahead: As in :func:`as_soon_as_can_be`.
    """
    total = len(arrivals)
    first = next(_ends(0, total, BLOCK, look_ahead))
    made = _ready(arrivals, first, look_ahead) + cost(first)
    # By place in the stream: when synthesis is free, and when all before it will have been heard.
    fronts: dict[int, list[tuple[float, float]]] = {first: [(made, made + first * FRAME_S)]}
    for start in range(first, total, BLOCK):
        for free, heard in fronts.pop(start, ()):
            for end in _ends(start, total, longest, look_ahead):
                made = max(free, _ready(arrivals, end, look_ahead)) + cost(end - start)
                fronts[end] = _front(fronts.get(end, []), (made, max(made, heard) + (end - start) * FRAME_S))
    first_audio = _ready(arrivals, first, look_ahead) + cost(first)
    ended = min(heard for _, heard in fronts[total])
    return max(0.0, ended - first_audio - total * FRAME_S)


def steady(seconds: float, rate: float) -> list[float]:
    """When the frames of speech become available that are sent block by block, made at so many a second."""
    frames = round(seconds / FRAME_S)
    return [min(math.ceil((index + 1) / BLOCK) * BLOCK, frames) / rate for index in range(frames)]


def _ready(arrivals: Sequence[float], end: int, look_ahead: int) -> float:
    """When a chunk with that end can be cut."""
    return arrivals[min(end + max(look_ahead, 1), len(arrivals)) - 1]


def _ends(start: int, total: int, longest: int, look_ahead: int) -> Iterator[int]:
    """Where a chunk may end: at blocks with their look-ahead behind them, or with the stream."""
    margin = max(look_ahead, 1)
    yield from range(start + BLOCK, min(start + longest, total - margin) + 1, BLOCK)
    if total < start + longest + margin:
        yield total


def _front(others: list[tuple[float, float]], new: tuple[float, float]) -> list[tuple[float, float]]:
    """Those that no other one is at least as early as in both times."""
    if any(free <= new[0] and heard <= new[1] for free, heard in others):
        return others
    return [each for each in others if each[0] < new[0] or each[1] < new[1]] + [new]
