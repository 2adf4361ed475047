"""The targets, and where what belongs to each of them lies."""

import hashlib
import importlib
import resource
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent
KIB_A_RUN: Final = 32 * 1024
"""Most KiB that the largest resident set may grow by while one input is looked at."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed together.

    Attributes:
        name: Of the target, its module, its corpus and its faults.
        max_bytes: Longest input.
        what: What it reads, in words.
    """

    name: str
    max_bytes: int
    what: str

    @property
    def faults(self) -> list[bytes]:
        """Inputs that once showed a fault: files TARGET/WHAT of ``faults.zip``, to which ``zip`` adds."""
        with zipfile.ZipFile(FOLDER / "faults.zip") as packed:
            return [packed.read(name) for name in packed.namelist() if name.startswith(f"{self.name}/")]

    @property
    def corpus(self) -> list[bytes]:
        """Inputs that together reach all that is known to be reachable."""
        with zipfile.ZipFile(self._packed) as packed:
            return [packed.read(name) for name in packed.namelist()]

    @property
    def kept(self) -> list[bytes]:
        """All inputs that are kept."""
        return [*self.corpus, *self.faults]

    def keep(self, inputs: Iterable[bytes]) -> None:
        """Replace the corpus; the same inputs give the same file."""
        by_name = {hashlib.sha1(each, usedforsecurity=False).hexdigest(): each for each in inputs}
        with zipfile.ZipFile(self._packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            for name in sorted(by_name):
                packed.writestr(zipfile.ZipInfo(name), by_name[name], zipfile.ZIP_DEFLATED)

    @property
    def _packed(self) -> Path:
        return FOLDER / "corpus" / f"{self.name}.zip"

    def load(self) -> tuple[Callable[[bytes], None], Callable[[], Iterable[bytes]]]:
        """Give the check, which raises for a fault, and what makes seeds where an old corpus is useless."""
        module = importlib.import_module(f"tests.fuzz.targets.{self.name}")
        return module.check, getattr(module, "seeds", tuple)


TARGETS: Final = {
    target.name: target
    for target in (
        Target("wire", 2048, "messages between the processes, and what follows from their fields"),
        Target("tcp", 2048, "the gateway's TCP protocol, from the first byte to the thinker's message"),
        Target("client", 2048, "the client's end of it"),
        Target("http", 2048, "HTTP and WebSockets at the gateway, and the stages' HTTP endpoint"),
        Target("body", 2048, "bodies of chat and speech, and the events of a realtime session"),
        Target("config", 2048, "YAML, environment variables, files of API keys and of CURVE keys"),
        Target("media", 2048, "URLs, the beginnings of files, the decoders' pipe, traceparent, ZAP"),
    )
}


def bounded(check: Callable[[bytes], None], data: bytes) -> None:
    """Check an input, and that it takes no memory to speak of.

    Raises:
        AssertionError: The process grew.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check(data)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown <= KIB_A_RUN, f"{len(data)} bytes made the process grow by {grown} KiB"
