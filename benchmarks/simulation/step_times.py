"""How long steps of the stages take, fitted to what a benchmark counted."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from benchmarks.measure.load import Load
from benchmarks.measure.results import RunResult
from benchmarks.measure.stages import Stage
from benchmarks.measure.workload import Workload
from omnirelay.errors import OmniRelayError
from shared.messages import STAGES, StageName

CODES_OF_A_BLOCK: Final = 12
"""Codec tokens of a block of the DiT in the released checkpoints."""
SPEECH_PROMPT: Final = 2
"""Positions that the talker's prompt has more than the thinker's."""
CHUNK_BLOCKS: Final = (1, 2, 4, 8)
"""Targets of a stream's first chunks; the rest have the last."""
LOOK_AHEAD: Final = 1
"""Blocks of a chunk's window beyond its target."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: ``step_s + unit_s * units``.

    A unit is a token for thinker and talker, in prompts too, and a block of a chunk's window for token2wav.
    """

    step_s: float
    unit_s: float

    def __call__(self, units: float) -> float:
        """Seconds of a step with so many units."""
        return self.step_s + self.unit_s * units

    def faster(self, times: float) -> "StepTime":
        """See :meth:`StepTimes.faster`."""
        return StepTime(step_s=self.step_s / times, unit_s=self.unit_s / times)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The step times of the three stages."""

    thinker: StepTime
    talker: StepTime
    token2wav: StepTime

    def faster(self, times: float) -> "StepTimes":
        """Those of a machine on which each step takes that much less."""
        return StepTimes(**{stage: getattr(self, stage).faster(times) for stage in STAGES})


def fit(result: RunResult) -> StepTimes:
    """Fit the step times to the seconds that the stages' loops worked, by least squares of relative errors.

    The answers' times are not used: a simulation can be checked against them.

    Raises:
        OmniRelayError: The run has fewer than two loads of OmniRelay.
    """
    loads = [each for each in result.loads if each.adapter == "omnirelay"]
    if len(loads) < 2:
        raise OmniRelayError(
            "step times cannot be fitted to fewer than two loads: measure more numbers of clients"
        )
    return StepTimes(**{stage: _fit([_row(load, stage) for load in loads]) for stage in STAGES})


def chunk_targets(blocks: int) -> list[int]:
    """Blocks of each chunk of a stream that is made without haste; what is left joins the last one's size."""
    targets: list[int] = []
    while blocks:
        targets.append(min(blocks, CHUNK_BLOCKS[min(len(targets), len(CHUNK_BLOCKS) - 1)]))
        blocks -= targets[-1]
    return targets


def _row(load: Load, stage: StageName) -> tuple[float, float, float]:
    """A load's steps, units, and seconds of work of a stage."""
    counted = next(each for each in load.stages if each.name == stage)
    answers = len(load.answers)
    if stage == "token2wav":
        steps, units = _synthesis(counted, load.workload, answers)
    else:
        prompt = load.workload.prompt_tokens + (SPEECH_PROMPT if stage == "talker" else 0)
        steps, units = counted.steps, counted.steps * counted.mean_batch + answers * prompt
    return steps, units, sum(seconds for activity, seconds in counted.seconds.items() if activity != "wait")


def _synthesis(counted: Stage, workload: Workload, answers: int) -> tuple[float, float]:
    """Rounds of chunks, and blocks of their windows.

    An engine's step is a step of the solver, or several; so rounds are counted by chunks.
    """
    targets = chunk_targets(-(-workload.codec_tokens // CODES_OF_A_BLOCK))
    chunks = answers * len(targets)
    return chunks / counted.mean_batch, answers * sum(targets) + chunks * LOOK_AHEAD


def _fit(rows: Sequence[tuple[float, float, float]]) -> StepTime:
    """The two coefficients, neither negative."""
    table = np.array([(steps / seconds, units / seconds) for steps, units, seconds in rows])
    ones = np.ones(len(rows))
    step_s, unit_s = np.linalg.lstsq(table, ones, rcond=None)[0]
    if step_s < 0 or unit_s < 0:
        # The better one alone.
        alone = [(float(column @ ones / (column @ column)), column) for column in table.T]
        errors = [float(np.sum((value * column - ones) ** 2)) for value, column in alone]
        step_s, unit_s = (alone[0][0], 0.0) if errors[0] < errors[1] else (0.0, alone[1][0])
    return StepTime(step_s=float(step_s), unit_s=float(unit_s))
