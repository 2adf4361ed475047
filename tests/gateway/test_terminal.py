"""How far long work is, in one rewritten line or plain ones."""

import asyncio
import io
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from omnirelay.cli import progress
from omnirelay.cli.output import say
from omnirelay.cli.progress import ERASE, ProgressLine
from omnirelay.events import ErrorEvent
from omnirelay.protocol import PROTOCOL_VERSION, Reply, Welcome, pack, read_frame, read_length
from tests.gateway.bench import Patch
from tests.support.terminal import COLUMNS, CTRL_C, piped, terminal

CLI = ("-m", "omnirelay.cli")
MAKER = """
import pathlib, sys, time
sys.stderr.write("tokenizer (0.1 s)\\nthinker, 1.1 million parameters (0.4 s)\\n")
sys.stderr.flush()
while not pathlib.Path("go on").exists():
    time.sleep(0.02)
directory = pathlib.Path(sys.argv[1])
directory.mkdir(parents=True)
(directory / "config.json").write_text("{}")
sys.stderr.write("files (0.1 s)\\n" if "--size" in sys.argv else "")
sys.exit(int(pathlib.Path("go on").read_text()))
"""


class Screen(io.StringIO):
    """A terminal as far as the code can tell; says when something new stands on it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Semaphore(0)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        length = super().write(text)
        self.written.release()
        return length


@pytest.fixture
def make_screen(monkeypatch: Patch) -> Callable[[], Screen]:
    """To be called by the test itself: pytest puts its own streams in place after the fixtures."""

    def make() -> Screen:
        shown = Screen()
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr(sys, "stdout", shown)
        return shown

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    return make


MakeScreen = Callable[[], Screen]


def next_write(shown: Screen) -> None:
    assert shown.written.acquire(timeout=60)


def test_the_line_is_rewritten_and_goes_away(make_screen: MakeScreen) -> None:
    screen = make_screen()
    text = ["loading"]
    with ProgressLine(lambda: text[0]) as line:
        assert line.visible
        next_write(screen)
        text[0] = "x" * 100
        while "x" not in screen.getvalue():
            next_write(screen)
    first, *others = screen.getvalue().split(ERASE)[1:]
    assert first == "loading (0 s)"
    assert "x" * 39 in others
    assert others[-1] == ""


def test_what_is_said_meanwhile_stands_above_the_line(make_screen: MakeScreen) -> None:
    screen = make_screen()
    with ProgressLine(lambda: "loading"):
        next_write(screen)
        say("something")
        # The thread may have drawn any number of times before the line could be said.
        while not screen.getvalue().rpartition("something\n")[2]:
            next_write(screen)
    assert re.search(re.escape(f"s){ERASE}something\n{ERASE}loading (") + r"\d s\)", screen.getvalue())


def test_what_is_soon_over_or_has_nothing_to_say_never_shows(make_screen: MakeScreen) -> None:
    screen = make_screen()
    with ProgressLine(lambda: "loading", patience_s=60):
        pass
    with ProgressLine(lambda: ""):
        say("an answer that comes in pieces", end="")
    assert screen.getvalue() == "an answer that comes in pieces"


@pytest.mark.parametrize("kind", ["dumb", None])
def test_dumb_terminals_show_nothing(make_screen: MakeScreen, monkeypatch: Patch, kind: str | None) -> None:
    screen = make_screen()
    if kind is None:
        monkeypatch.delenv("TERM")
    else:
        monkeypatch.setenv("TERM", kind)
    with ProgressLine(lambda: "loading") as line:
        assert not line.visible
    assert screen.getvalue() == ""


def test_a_terminal_that_goes_away_harms_nobody(make_screen: MakeScreen, monkeypatch: Patch) -> None:
    screen = make_screen()
    tried = threading.Event()

    def fail(_: str) -> int:
        tried.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(screen, "write", fail)
    with ProgressLine(lambda: "loading"):
        assert tried.wait(60)


async def test_up_at_a_terminal(place: Path) -> None:
    async with terminal(*CLI, "up", cwd=place, **stack_variables()) as shown:
        await shown.see("waiting for gateway, thinker, talker, token2wav (")
        before = await shown.see("ready: tcp://")
        assert before.count("is ready after") == 4
        assert re.search(r"waiting for [a-z2, ]+ \(\d+ s\)\x1b?", before)
        assert "waiting for" not in before.rpartition(ERASE)[2]
        shown.type(CTRL_C)
        await shown.see("stopped")
        assert await shown.ended() == 0


def stack_variables() -> dict[str, str]:
    """What the fixture ``place`` has set; a terminal's program is not given it by itself."""
    return {key: value for key, value in os.environ.items() if key.startswith(("OMNI", "FAKE"))}


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """A working directory whose ``checkpoint`` makes nothing, and waits to be told to."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "__main__.py").write_text(MAKER)
    (tmp_path / "checkpoint" / "__init__.py").touch()
    return tmp_path


async def test_making_a_checkpoint_at_a_terminal(workshop: Path) -> None:
    async with terminal(*CLI, "checkpoint", "there", cwd=workshop) as shown:
        await shown.see("making the checkpoint, done: tokenizer, thinker (")
        (workshop / "go on").write_text("0")
        assert await shown.ended() == 0
        assert "million" not in shown.seen
    assert (workshop / "there" / "config.json").is_file()


async def test_making_a_checkpoint_that_fails_at_a_terminal_shows_all_that_was_told(workshop: Path) -> None:
    (workshop / "go on").write_text("3")

    async with terminal(*CLI, "checkpoint", "there", cwd=workshop) as shown:
        await shown.see("thinker, 1.1 million parameters (0.4 s)\r\nfiles (0.1 s)")
        assert await shown.ended() == 3


async def test_making_a_checkpoint_elsewhere_prints_lines(workshop: Path) -> None:
    (workshop / "go on").write_text("0")

    status, _, told = await piped(*CLI, "checkpoint", "there", lines=b"", cwd=workshop)
    assert status == 0
    assert told == "tokenizer (0.1 s)\nthinker, 1.1 million parameters (0.4 s)\nfiles (0.1 s)\n"


async def test_a_large_file_on_its_way(tmp_path: Path) -> None:
    """A gateway that reads half of a request, and the rest when it is told to."""
    (tmp_path / "film.mp4").write_bytes(bytes(40 * 2**20))
    go_on = asyncio.Event()
    read: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader, 1000)
        writer.write(pack(Welcome(PROTOCOL_VERSION)))
        length = await read_length(reader, 2**30)
        await reader.readexactly(length // 2)
        await go_on.wait()
        await reader.readexactly(length - length // 2)
        read.append(length)
        writer.write(pack(Reply(1, ErrorEvent(code="busy", message="come again"))))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**16) as server:
        port = server.sockets[0].getsockname()[1]
        arguments = ("chat", "--video", "film.mp4", "--gateway", f"tcp://127.0.0.1:{port}")
        async with terminal(*CLI, *arguments, cwd=tmp_path) as shown:
            sent = 0
            while sent < 20:
                line = re.search(r"sending (\d+) MiB of 40 MiB \($", await shown.see(" of 40 MiB ("))
                assert line is not None
                sent = int(line[1])
            assert sent < 40
            go_on.set()
            told = await shown.see("omnirelay: busy: come again")
            assert len(told) < 10 * COLUMNS
            assert "sending" not in told.rpartition(ERASE)[2]
            assert await shown.ended() == 1
    assert read[0] > 40 * 2**20
