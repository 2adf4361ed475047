"""Every process ends when it is told to, at whatever moment, with the status that the documentation says."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from shared.transport.keys import make_keys
from tests.shared.support import free_address, wait_until
from tests.support.children import ROOT, Child, python
from tests.support.stack import inherited

STUBBORN = """
import os
import sys
import threading
from shared.stage.process import run_stage
from shared.messages import Token2WavInput

def build(config, model, context, gateway):
    threading.Thread(target=threading.Event().wait).start()
    # Not printed: what this process prints becomes lines of its log.
    os.write(1, b"loading\\n")
    while True:
        try:
            sys.stdin.read()
        except BaseException:
            pass

run_stage("token2wav", Token2WavInput, build)
"""
"""Its engine catches whatever is raised, and a thread of its own never ends."""

HANGING = """
import threading
import shared.ending
shared.ending.END_S = 0.2
start = shared.ending.Start()
start.closing.callback(threading.Event().wait)
print("begun", flush=True)
threading.Event().wait()
"""
"""What it has can never be closed."""

PARENT = """
import multiprocessing
import time
from shared.ending import run_to_end

def sleep():
    time.sleep(3600)

def work():
    child = multiprocessing.Process(target=sleep)
    child.start()
    print(child.pid, flush=True)
    return 3

if __name__ == "__main__":
    run_to_end(work)
"""


def environment(model: Path, **overrides: str) -> dict[str, str]:
    """Addresses of a gateway and of token2wav that nobody uses."""
    names = ["GATEWAY__LISTEN", "GATEWAY__HTTP", "GATEWAY__MONITOR", "GATEWAY__EVENTS", "GATEWAY__CONTROL"]
    names += ["STAGES__TOKEN2WAV__INBOX", "STAGES__TOKEN2WAV__HTTP"]
    addresses = {f"OMNIRELAY_{name}": free_address() for name in names}
    ours = {"OMNI_MODEL": str(model), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return inherited() | addresses | ours | overrides


@pytest.mark.parametrize(("what", "every"), [("stage", 53), ("gateway", 149)])
@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.long)])
def test_a_process_ends_whenever_it_is_told_to(
    tiny_checkpoint: Path, tmp_path: Path, what: str, every: int, number: str
) -> None:
    """With keys, so that all sockets and threads are there that can be."""
    make_keys(tmp_path / "keys", replace=False)
    done = subprocess.run(
        python("-m", "tests.support.stopping", what, number, str(every)),
        env=environment(tiny_checkpoint, OMNIRELAY_SECURITY__KEYS=str(tmp_path / "keys")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    ends = [line.split() for line in done.stdout.splitlines()]
    assert len(ends) > 10
    assert [end for end in ends if end[1] != "0" or float(end[2]) > 10] == []
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_of_the_engine_can_keep_a_stage_that_is_told_to_end(
    tiny_checkpoint: Path, number: signal.Signals
) -> None:
    with Child(
        python("-c", STUBBORN),
        env=environment(tiny_checkpoint),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(number)
        assert process.wait(timeout=60) == 0


def test_a_process_that_cannot_close_what_it_has_says_where_it_is_and_ends() -> None:
    with Child(
        python("-c", HANGING), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.terminate()
        _, told = process.communicate(timeout=60)
        assert process.returncode == 1
    assert told.startswith("Timeout (0:00:00.200000)!")
    assert "shared/ending.py" in told


def test_workers_of_a_library_end_with_their_process(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with Child(
        python(str(program)), env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    ) as process:
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 3
    wait_until(lambda: not psutil.pid_exists(json.loads(told)))


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (
            ("-c", "from shared.ending import run_to_end; run_to_end(lambda: {}['none'])"),
            1,
            "KeyError: 'none'",
        ),
        (("-m", "gateway", "--nothing"), 2, "unrecognized arguments: --nothing"),
    ],
)
def test_a_process_that_cannot_run_ends_with_a_status(
    arguments: tuple[str, ...], status: int, told: str
) -> None:
    done = subprocess.run(
        python(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert told in done.stderr
