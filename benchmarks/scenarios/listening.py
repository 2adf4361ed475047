"""What listeners of the default checkpoint hear."""

from collections.abc import Iterable

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.measure.answer import Timing, timing
from benchmarks.measure.checkpoints import make
from benchmarks.measure.results import Measured
from omnirelay import AsyncClient
from shared.config import DEFAULT_CHECKPOINT


def heard(name: str, answers: Iterable[Timing]) -> Measured:
    """What the listeners of some answers heard."""
    found = list(answers)
    figures = {
        "first audio, s": [each.ttfa_s for each in found],
        "advised start, s": [each.start_s for each in found],
        "silence, s": [each.stalled_s for each in found],
        "silence after the advised start, s": [each.stalled_after_delay_s for each in found],
        "real-time factor": [each.real_time_factor for each in found],
    }
    whole = sum(each.underruns_after_delay == 0 for each in found)
    return Measured(name, {**figures, "answers without a gap, %": [100 * whole / max(1, len(found))]})


async def real_time(count_of_each: int, most: int | None = None) -> list[Measured]:
    """Ask the default checkpoint ``most`` held-out questions of ``benchmarks.quality``, in turn."""
    from benchmarks.quality.answers import held_out_requests, request  # noqa: PLC0415 - needs what trains checkpoints

    requests = [each for each in held_out_requests(count_of_each) if each.is_spoken][:most]
    if not (DEFAULT_CHECKPOINT / "config.json").is_file():
        make("speaking", DEFAULT_CHECKPOINT)
    async with OmniRelay(DEFAULT_CHECKPOINT) as server, AsyncClient(server.address) as client:
        # The first four are not counted: a new process learns how long its steps take.
        asked = [*requests[:4], *requests]
        answers = [await server.measured(client.chat(request(each))) for each in asked]
    return [heard("held-out questions", map(timing, answers[4:]))]
