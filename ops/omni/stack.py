"""``omnirelay up`` as a child of a program, on addresses that no other process uses."""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Final

import yaml

from omnirelay.errors import GatewayUnreachableError, MessageError, OutputError, StageStartError
from ops.child import STOP_S, Child, last_words
from ops.launcher import FAREWELL_S, POLL_S
from ops.target import own_target
from shared.config import check_values, is_ours, read_values
from shared.messages import STAGES


class OwnStack:
    """A stack that belongs to this process and ends with it.

    Args:
        model: A directory or a hub id; None is that of the environment, or the default checkpoint.
        configuration: Keys of the configuration, before those of the environment.
        log: Where the output of its processes is written; None is a temporary file, which stays only if an
            error names it.

    Attributes:
        config: The configuration.
        target: Its gateway.
        log: The file of its output.

    Raises:
        ConfigError: A key or value is not allowed.
        OutputError: The log cannot be written.
    """

    def __init__(
        self, model: str | Path | None, configuration: Mapping[str, Any], log: str | Path | None
    ) -> None:
        chosen = {} if model is None else {"model": str(model)}
        with ExitStack() as held:
            self._folder: Final = Path(tempfile.mkdtemp(prefix="omnirelay-"))
            held.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._values = read_values()
            # Explicit addresses of the environment are those of another stack.
            for changes in (_addresses(self._folder, held), configuration, chosen):
                self._values = merged(self._values, changes)
            self.config: Final = check_values(self._values, "the options of the stack")
            self.target: Final = own_target(self.config)
            self._keeps_log = log is not None
            self.log: Final = Path(log) if log is not None else self._folder.with_suffix(".log")
            self._file: Final = held.enter_context(_opened(self.log))
            self._held: Final = held.pop_all()
        self._child: Child | None = None

    async def start(self) -> None:
        """Start the processes, and wait until all serve.

        Raises:
            StageStartError: They ended; the message has their last lines, and names the log.
        """
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(self._values), encoding="utf-8")
        command = [sys.executable, "-m", "omnirelay.cli", "up", "--config", str(path)]
        # All that they say is in the file.
        unset = dict.fromkeys(filter(is_ours, os.environ))
        self._child = await Child.start("stack", command, self._write, unset)
        while not await self._serves():
            if not self._child.alive:
                words = last_words("stack", f"{self._child.ending} before it served", self._child.tail)
                raise StageStartError(f"the {words}\n{self.name_log()}")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Stop the processes, if that has not been done, and remove the files."""
        if self._child is not None:
            await self._child.end(self.config.gateway.drain_s + FAREWELL_S + 2 * STOP_S)
        self._held.close()
        if not self._keeps_log:
            self.log.unlink(missing_ok=True)

    def name_log(self) -> str:
        """Where the log is, for an error; it stays then."""
        self._keeps_log = True
        return f"the log of the stack is {self.log}"

    def _write(self, _name: str, line: str) -> None:
        # What a full disk does not take is lost: the stack goes on, and errors have its last lines.
        with suppress(OSError):
            self._file.write(f"{line}\n".encode())

    async def _serves(self) -> bool:
        with suppress(GatewayUnreachableError, MessageError):
            return (await self.target.status()).ready
        return False


def _opened(log: Path) -> IO[bytes]:
    try:
        return log.open("wb", buffering=0)
    except OSError as error:
        raise OutputError(f"cannot write the log {log}: {error.strerror}") from error


def _addresses(folder: Path, held: ExitStack) -> dict[str, Any]:
    """Addresses of a stack: a free port for clients, sockets in a folder, no HTTP unless asked for."""
    listening = held.enter_context(socket.socket())
    listening.bind(("127.0.0.1", 0))
    # While this socket is bound nobody else is given the port, and the gateway may listen there.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    gateway: dict[str, Any] = {key: f"ipc://{folder}/{key}" for key in ("events", "control")}
    gateway |= {"listen": f"tcp://127.0.0.1:{listening.getsockname()[1]}", "http": None, "monitor": None}
    stages = {name: {"inbox": f"ipc://{folder}/{name}", "http": None} for name in STAGES}
    return {"gateway": gateway, "stages": stages}


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes, section by section."""
    whole = dict(values)
    for key, change in changes.items():
        known = whole.get(key)
        both = isinstance(known, Mapping) and isinstance(change, Mapping)
        whole[key] = merged(known, change) if both else change  # type: ignore[arg-type]  # both are
    return whole
