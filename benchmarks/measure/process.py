"""Measurements in a process of their own: it prints one line of JSON, its last."""

import os
import subprocess
import sys
from typing import Any, NoReturn, TypeVar

import msgspec

from omnirelay.errors import OmniRelayError

T = TypeVar("T")


def in_process(kind: type[T], module: str, *arguments: object, timeout_s: float = 1800.0) -> T:
    """Run a module, and decode what it prints.

    Raises:
        OmniRelayError: It failed, or took too long.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    command_line = " ".join(command[2:])
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=timeout_s, check=False)  # noqa: S603 - ours
    except subprocess.TimeoutExpired as error:
        raise OmniRelayError(f"{command_line} took more than {timeout_s:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise OmniRelayError(f"{command_line} ended with status {done.returncode}; its messages are above")
    return msgspec.json.decode(lines[-1], type=kind)


def answer(value: Any) -> NoReturn:
    """Print the result and end the process.

    As a stage does: nothing depends on taking torch and vLLM down piece by piece.
    """
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)
