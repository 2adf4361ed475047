"""One stream through planner and pace on a clock that is set, not waited for."""

import math
from collections.abc import Callable, Sequence

from services.token2wav.chunks import ChunkingConfig, ChunkPlanner, CodecGeometry
from services.token2wav.pace import Pace
from shared.config import Token2WavConfig

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
    config: ChunkingConfig | None = None,
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
    config = config or ChunkingConfig()
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
