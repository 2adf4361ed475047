"""The ODE solver: where in time it stops, and one Runge-Kutta step for many requests at once.

Flow matching turns noise at t=0 into a mel spectrogram at t=1 along dx/dt = velocity(t, x).
Reference: ``RungeKutta4ODESolver`` and ``Qwen2_5OmniToken2WavDiTModel.sample`` of transformers.
"""

from collections.abc import Callable
from typing import Final

import torch

Velocity = Callable[[torch.Tensor, int], torch.Tensor]
"""(values [rows, ...], number of the evaluation in its step) -> derivative, shaped as the values."""

EVALUATIONS_PER_STEP: Final = 4

_THIRD = 1 / 3
_TWO_THIRDS = 2 / 3


def time_points(count: int, sway_coefficient: float | None) -> torch.Tensor:
    """Points in time between which the solver steps, from 0 to 1; float32 [count], on the CPU.

    Sway sampling (Chen et al., "F5-TTS", 2024, eq. 7) with a negative coefficient puts more of them
    near 0, where the shape of the speech is decided; None spaces them evenly.
    """
    points = torch.linspace(0, 1, count, dtype=torch.float32)
    if sway_coefficient is not None:
        points = points + sway_coefficient * (torch.cos(torch.pi / 2 * points) - 1 + points)
    return points


def evaluation_times(points: torch.Tensor) -> torch.Tensor:
    """When :func:`advance` evaluates the derivative between stops [steps + 1]; float32 [steps * 4]."""
    start, end = points[:-1], points[1:]
    length = end - start
    times = [start, start + length * _THIRD, start + length * _TWO_THIRDS, end]
    return torch.stack(times, dim=1).flatten()


def advance(velocity: Velocity, value: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Integrate every request over one time interval of its own, by Kutta's 3/8 rule.

    Args:
        velocity: the derivative; called :data:`EVALUATIONS_PER_STEP` times, at the interval's
            :func:`evaluation_times`.
        value: values at the interval's beginning, float32 [rows, ...], the rows of all requests together.
        step: length of each row's interval, float32 of a shape that goes with the values'.
    """
    k1 = velocity(value, 0)
    k2 = velocity(value + step * k1 * _THIRD, 1)
    k3 = velocity(value + step * (k2 - k1 * _THIRD), 2)
    k4 = velocity(value + step * (k1 - k2 + k3), 3)
    return value + (k1 + 3 * (k2 + k3) + k4) * step / 8
