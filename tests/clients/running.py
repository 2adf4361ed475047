"""Programs as users write them, each run in the environment of its client."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.children import ROOT, Child
from tests.support.stack import inherited

PROGRAMS = Path(__file__).with_name("programs")
EXAMPLES = ROOT / "examples" / "voice"
ENVIRONMENTS = ROOT / ".venv-clients"
INTERPRETERS = {".py": "python", ".sh": "bash", ".mjs": "node"}
ANSWER = "twenty plus sixteen is thirty six"
"""To the question that the programs ask."""
HEARD = "eight plus seven is fifteen"
"""The answer to what the recording asks."""
TRANSCRIPT = "what is eight plus seven"
RATE = 24_000
TIMEOUT_S = 240.0
"""A program is killed then: several times what one takes on a machine of its own."""
QUIET = 500
SHORTEST_S, LONGEST_S = 0.5, 8.0
"""Seconds of speech in an answer of a few words."""


class Programs:
    """Runs the programs of this package.

    Args:
        url: The server's, without a path.
        checkpoint: What it serves.
        folder: Where they run.
    """

    def __init__(self, url: str, checkpoint: Path, folder: Path) -> None:
        self.url = url
        self.checkpoint = checkpoint
        self.folder = folder

    def run(self, client: str, program: str | Path, arguments: Sequence[str] = ()) -> dict[str, Any]:
        """Return what a program printed in its last line, which is JSON.

        Args:
            client: The environment in ``.venv-clients`` that it needs.
            program: Its file: Python, a shell's, or Node's.
            arguments: Of its command line.
        """
        return json.loads(self.output(client, program, arguments).strip().rpartition("\n")[2])

    def output(self, client: str, program: str | Path, arguments: Sequence[str] = ()) -> str:
        """Return all that a program printed, as :meth:`run` runs it."""
        # Node looks for packages beside the program.
        modules, path = self.folder / "node_modules", self.folder / Path(program).name
        modules.unlink(missing_ok=True)
        modules.symlink_to(ENVIRONMENTS / client / "node_modules")
        shutil.copyfile(PROGRAMS / program, path)
        with Child(
            [INTERPRETERS[path.suffix], path, *arguments],
            cwd=self.folder,
            env=self.environment(client),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=TIMEOUT_S)
            finally:
                # Its children, too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{program} ended with {process.returncode}:\n{output}{errors}"
        return output

    def environment(self, client: str) -> dict[str, str]:
        """Variables of a process in the environment of a client."""
        # The tests' own process is kept from Hugging Face, which a user's is not.
        variables = {
            key: value for key, value in inherited().items() if not key.startswith(("HF_", "TRANSFORMERS_"))
        }
        return variables | {
            "PATH": f"{ENVIRONMENTS / client / 'bin'}{os.pathsep}{os.environ['PATH']}",
            # The examples' agents and the benchmark's user are imported.
            "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{PROGRAMS}",
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "RECORDING": str(self.checkpoint / "starter.wav"),
            "CHECKPOINT": str(self.checkpoint),
        }


def assert_speech(pcm: str, rate: int = RATE) -> None:
    """Check samples of 16 bits, mono, in base64: not silent, and as long as a few words are."""
    samples = np.frombuffer(base64.b64decode(pcm), "<i2")
    assert SHORTEST_S < len(samples) / rate < LONGEST_S
    assert np.abs(samples.astype(np.int32)).max() > QUIET
