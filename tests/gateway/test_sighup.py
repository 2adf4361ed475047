"""SIGHUP asks for files to be read again, and ends nothing."""

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from omnirelay import Client
from ops import child
from tests.gateway.test_processes import gone, read_until, start, wait_for


def test_a_gateway_with_nothing_to_read_again_says_so(place: Path) -> None:
    with start("gateway") as process:
        try:
            read_until(process, "listening on")
            process.send_signal(signal.SIGHUP)
            read_until(process, "nothing to reload")
            process.terminate()
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0


def test_the_launcher_passes_it_on_to_its_gateway(place: Path) -> None:
    with start("omnirelay.cli", "up") as process:
        try:
            read_until(process, "ready: tcp://")
            with Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"]) as client:
                before = client.status()
                process.send_signal(signal.SIGHUP)
                read_until(process, "nothing to reload")
                assert client.chat("Hello").result().text
                after = client.status()
            assert after.gateway.pid == before.gateway.pid
            assert [each.pid for each in after.stages] == [each.pid for each in before.stages]
            process.terminate()
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, rest


def test_children_of_the_launcher_outlive_it_at_any_time() -> None:
    """Also before they have a handler of their own."""
    code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
    command = [sys.executable, "-I", str(child.GUARD), str(os.getpid()), sys.executable, "-c", code]
    assert subprocess.run(command, check=False, timeout=20).returncode == 0


def test_a_stack_whose_terminal_is_closed_stops_in_order(place: Path) -> None:
    ours, theirs = pty.openpty()
    code = (
        # As a shell starts it: another test may have left SIGHUP ignored in this process.
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
        "terminal = os.open(sys.argv[1], os.O_RDWR);"
        "[os.dup2(terminal, number) for number in (0, 1, 2)];"
        "os.execv(sys.executable, [sys.executable, '-m', 'omnirelay.cli', 'up'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, os.ttyname(theirs)], start_new_session=True)
    try:
        seen = b""
        while b"ready: tcp://" not in seen:
            seen += os.read(ours, 1 << 16)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 4
        os.close(theirs)
        os.close(ours)
        assert process.wait(timeout=60) == 0
        wait_for(lambda: all(gone(int(each)) for each in children))
    finally:
        with suppress(OSError):
            os.close(ours)
        process.kill()
        process.wait()
