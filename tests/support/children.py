"""Child processes that no test can wait for without end."""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, AnyStr

import pytest

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]
Folders = pytest.TempPathFactory
Log = pytest.LogCaptureFixture
ROOT = Path(__file__).resolve().parents[2]


class Child(subprocess.Popen[AnyStr]):
    """A process that is killed, if it has not ended, when its ``with`` block is left.

    Attributes:
        stdin: There if it was asked for, as are the others.
    """

    stdin: IO[AnyStr]
    stdout: IO[AnyStr]
    stderr: IO[AnyStr]

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave no process behind, whatever has failed."""
        self.kill()
        super().__exit__(exc_type, value, traceback)


def python(*arguments: str) -> list[str]:
    """The command that runs this interpreter."""
    return [sys.executable, *arguments]
