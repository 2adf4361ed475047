"""The training loop of every part: resumable, with averaged weights and a time limit."""

import logging
import math
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from labs.training.files import replacing

_SAVE_SECONDS = 240.0
_REPORT_STEPS = 100
_FINAL_RATE = 0.02
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_logger = logging.getLogger(__name__)

Losses = dict[str, torch.Tensor]
Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Recipe:
    """How a part is trained: AdamW, a linear warm-up, then a half cosine down to a fiftieth of the rate."""

    steps: int
    rate: float
    warmup: int = 200
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    average: float = 0.999

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        falling = 0.5 * (1 + math.cos(math.pi * min(step / self.steps, 1.0)))
        return self.rate * min(1.0, (step + 1) / self.warmup) * (_FINAL_RATE + (1 - _FINAL_RATE) * falling)


@dataclass(frozen=True)
class Step:
    """One step of a training: its number, and a seed of its own, so that a resumed run draws the same."""

    number: int
    seed: int


class Stop:
    """True once the time limit has passed or a signal asked the process to stop."""

    def __init__(self, hours: float) -> None:
        self._deadline = time.monotonic() + hours * 3600
        self._asked = False

    def __bool__(self) -> bool:
        return self._asked or time.monotonic() > self._deadline

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Stop after the step in progress when the process is asked to end."""
        before = [signal.signal(kind, self._ask) for kind in _SIGNALS]
        try:
            yield
        finally:
            for kind, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(kind, handler)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True


class Training:
    """One part's training: weights, their running average, the optimizer, and how far it has come.

    Args:
        name: names the files in ``directory``: ``NAME.state.pt`` and ``NAME.safetensors``, the average.
        model: whose parameters are trained.
        recipe: how.
        directory: where the state is kept; a state found there is resumed.
    """

    def __init__(self, name: str, model: nn.Module, recipe: Recipe, directory: Path) -> None:
        self.name = name
        self.recipe = recipe
        self._model = model
        self._directory = directory
        self._parameters = {key: value for key, value in model.named_parameters() if value.requires_grad}
        self._average = {key: value.detach().clone() for key, value in self._parameters.items()}
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()), recipe.rate, recipe.betas, weight_decay=recipe.weight_decay
        )
        self.steps = 0
        self.seconds = 0.0
        self._resume()

    @property
    def finished(self) -> bool:
        """All steps of the recipe were made."""
        return self.steps >= self.recipe.steps

    def run(self, losses_of: Callable[[Step], Losses], stop: Stop) -> None:
        """Train until the recipe's steps are made or ``stop`` says so; the sum of the losses is minimized."""
        saved = time.monotonic()
        report = _Report(self)
        self._model.train()
        while not self.finished and not stop:
            start = time.monotonic()
            step = self._step(self.steps)
            torch.manual_seed(step.seed)
            losses = losses_of(step)
            self._update(losses)
            self.seconds += time.monotonic() - start
            report.add(losses)
            if time.monotonic() - saved > _SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def drawn_ahead(self, draw: Callable[[Step], Drawn]) -> Iterator[Drawn]:
        """Return what ``draw`` makes for each step that is left, in a process of its own."""
        # What the loader calls collating is all that there is to do for a step.
        work: dict[str, Any] = {"collate_fn": draw, "num_workers": 1, "prefetch_factor": 4}
        steps: Any = [self._step(number) for number in range(self.steps, self.recipe.steps)]
        return iter(DataLoader(steps, None, worker_init_fn=_leave_signals, **work))

    def _step(self, number: int) -> Step:
        return Step(number, zlib.crc32(f"{self.name}/{number}".encode()))

    def _update(self, losses: Losses) -> None:
        rate = self.recipe.rate_at(self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.recipe.clip)
        self._optimizer.step()
        self.steps += 1
        # A shorter window at first, so that the initial weights leave the average.
        keep = min(self.recipe.average, self.steps / (self.steps + 9))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.values()), list(self._parameters.values()), 1 - keep)

    def save(self) -> None:
        """Write the state and the averaged weights, each completely or not at all."""
        state: dict[str, Any] = {
            "steps": self.steps,
            "seconds": self.seconds,
            "model": dict(self._parameters),
            "average": self._average,
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._directory / f"{self.name}.state.pt") as path:
            torch.save(state, path)
        with replacing(weights_file(self._directory, self.name)) as path:
            save_file({key: value.contiguous().cpu() for key, value in self._average.items()}, path)

    def _resume(self) -> None:
        path = self._directory / f"{self.name}.state.pt"
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True, map_location="cpu")
        with torch.no_grad():
            for key, value in self._parameters.items():
                value.copy_(state["model"][key])
                self._average[key].copy_(state["average"][key])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.seconds = state["steps"], state["seconds"]
        _logger.info("%s: resumed at step %d", self.name, self.steps)


def _leave_signals(_worker: int) -> None:
    # A terminal or a supervisor sends them to the whole group; the step in progress needs its batch.
    for kind in _SIGNALS:
        signal.signal(kind, signal.SIG_IGN)


class _Report:
    """Logs mean losses and the speed."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._values: dict[str, list[torch.Tensor]] = {}
        self._steps, self._seconds = training.steps, training.seconds

    def add(self, losses: Losses) -> None:
        for name, value in losses.items():
            self._values.setdefault(name, []).append(value.detach())
        training = self._training
        if training.steps % _REPORT_STEPS:
            return
        means = " ".join(f"{name} {torch.stack(found).mean():.4f}" for name, found in self._values.items())
        speed = (training.steps - self._steps) / (training.seconds - self._seconds)
        _logger.info(
            "%s: step %d of %d, %.0f s, %.2f steps/s, %s",
            training.name,
            training.steps,
            training.recipe.steps,
            training.seconds,
            speed,
            means,
        )
        self._values.clear()
        self._steps, self._seconds = training.steps, training.seconds


def weights_file(directory: Path, name: str) -> Path:
    """Return where the averaged weights of a part are."""
    return directory / f"{name}.safetensors"


@torch.no_grad()
def load_average(directory: Path, name: str, model: nn.Module) -> None:
    """Put the averaged weights of a part into ``model``."""
    parameters = dict(model.named_parameters())
    for key, value in load_file(weights_file(directory, name)).items():
        parameters[key].copy_(value)


def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_16_bits(place: torch.device) -> torch.autocast:
    """Compute matrix products in bfloat16 where ``place`` has instructions for them."""
    able = place.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(place.type, torch.bfloat16, enabled=able)
