"""The commands of the quick start run as they stand there, in a shell.

``omnirelay up`` and ``demo`` are tested elsewhere, ``doctor`` with the whole stack.
"""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from shared.config import DEFAULT_CHECKPOINT, Config
from tests.gateway.bench import bench
from tests.support.children import ROOT
from tests.support.ports import free_ports
from tests.support.terminal import environment

SHIM = """#!/bin/sh
case "$1" in chat|status) set -- "$@" --gateway {gateway};; esac
exec {python} -m omnirelay.cli "$@"
"""


def commands() -> list[str]:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").replace("\\\n", "")
    found = re.findall(r"^ {4}((?:omnirelay|printf|curl|source <).*)$", text, re.MULTILINE)
    return [command for command in found if command != "omnirelay doctor"]


async def test_the_quick_start(configure: Callable[..., Config], tmp_path: Path) -> None:
    assert len(commands()) >= 8
    made = tmp_path / DEFAULT_CHECKPOINT
    made.parent.mkdir(parents=True)
    made.symlink_to(ROOT / "checkpoint" / made.name)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    http = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    async with bench(configure({"http": http})) as b:
        b.stages.serve(b.encode("Hello"))
        shim = tmp_path / "omnirelay"
        shim.write_text(SHIM.format(gateway=b.listen, python=sys.executable))
        shim.chmod(0o755)
        for command in commands():
            if command.startswith("curl") and shutil.which("curl") is None:
                continue
            process = await asyncio.create_subprocess_exec(
                "bash",
                "-ec",
                command.replace("http://127.0.0.1:8000", http.replace("tcp", "http")),
                cwd=tmp_path,
                env=environment(**path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, told = await process.communicate(b"Hi\n" if command == "omnirelay chat" else b"")
            if not command.startswith("curl"):
                assert process.returncode == 0, (command, told)
                assert (b"written: reply.wav\n" in told) == ("--out reply.wav" in command)
            assert b"Hello" in out or command.startswith(("omnirelay status", "source"))
        kinds = [tuple(item.kind for item in request.media) for request in b.stages.requests]
        assert kinds == [(), (), (), ("image",), ("audio",), ()]
    assert (tmp_path / "reply.wav").stat().st_size > 44
