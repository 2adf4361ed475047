"""When token2wav sent each chunk, noted by its process and read by the harness.

Both are on one machine, where ``time.monotonic`` is the same clock in all processes.
"""

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, Self

from shared.messages import AudioChunk
from shared.transport.routing import Outlet

FILE_VARIABLE: Final = "BENCHMARK_STAMPS"
"""Names the file, in the environment of the process that notes."""


class Stamps:
    """The reading end.

    Args:
        path: Where the file is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._sent: dict[str, dict[int, float]] = defaultdict(dict)

    def __enter__(self) -> Self:
        """Make the file; processes that are started now write to it."""
        self._path.touch()
        os.environ[FILE_VARIABLE] = str(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        """Processes that are started from now on do not know of it."""
        del os.environ[FILE_VARIABLE]

    def of(self, request_id: str) -> dict[int, float]:
        """When each chunk of a request was sent, by its number; forgets the request."""
        with self._path.open(encoding="ascii") as file:
            file.seek(self._read)
            text = file.read()
        self._read += text.rfind("\n") + 1
        for line in text[: text.rfind("\n") + 1].splitlines():
            name, seq, at = line.split()
            self._sent[name][int(seq)] = float(at)
        return self._sent.pop(request_id, {})


def note_chunks(queue: Outlet[Any]) -> None:
    """Note each chunk that is put into a queue, before it is encoded."""
    file = os.open(os.environ[FILE_VARIABLE], os.O_WRONLY | os.O_APPEND)
    put = queue.put

    def noted(message: Any) -> int:
        if isinstance(message, AudioChunk):
            os.write(file, f"{message.request_id} {message.seq} {time.monotonic()!r}\n".encode())
        return put(message)

    setattr(queue, "put", noted)  # noqa: B010 - a method may not be assigned to
