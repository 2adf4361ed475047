"""Plays speech with the machine's own player, which reads raw PCM from standard input."""

import logging
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO, Final, Self

from omnirelay.client.types import ChatEvent
from omnirelay.errors import PlayerError
from omnirelay.events import AudioEvent
from omnirelay.values import SAMPLE_BYTES, SAMPLE_RATE

_RATE: Final = str(SAMPLE_RATE)
REBUFFER_S: Final = 1.2
"""How much is collected after a gap, once in an answer."""
GRACE_S: Final = 10.0
"""A player may take this much longer than the speech."""
HELP_S: Final = 5.0
MAX_SAID_BYTES: Final = 1000
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Player:
    """A program that plays mono float32, little-endian, from standard input.

    ``needs`` is an option that it must know, since older builds read something else.
    """

    program: str
    arguments: tuple[str, ...]
    needs: str | None = None

    def present(self) -> bool:
        """Whether it is on PATH and knows the option that it needs."""
        path = shutil.which(self.program)
        if path is None or self.needs is None:
            return path is not None
        try:
            # From the user's own PATH, as the player itself.
            shown = subprocess.run([path, "--help"], capture_output=True, timeout=HELP_S, check=False)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired) as error:
            log.debug("%s --help failed: %s", path, error)
            return False
        return self.needs.encode() in shown.stdout + shown.stderr


PLAYERS: Final = (
    Player(
        "paplay", ("--raw", f"--rate={_RATE}", "--channels=1", "--format=float32le", "--latency-msec=200")
    ),
    Player("pw-play", ("--raw", f"--rate={_RATE}", "--channels=1", "--format=f32", "-"), needs="--raw"),
    Player("aplay", ("-q", "-t", "raw", "-f", "FLOAT_LE", "-r", _RATE, "-c", "1", "-")),
    # Raw input is mono by default; the option for it changed between releases.
    Player(
        "ffplay",
        ("-nodisp", "-autoexit", "-loglevel", "error", "-f", "f32le", "-sample_rate", _RATE, "-i", "-"),
    ),
    # SoX.
    Player("play", ("-q", "-t", "raw", "-e", "floating-point", "-b", "32", "-r", _RATE, "-c", "1", "-")),
)
"""In order of preference."""
PLAYER_NAMES: Final = ", ".join(player.program for player in PLAYERS)


def find_player() -> Player | None:
    """The first player that is installed."""
    return next((player for player in PLAYERS if player.present()), None)


def require_player() -> Player:
    """The first player that is installed.

    Raises:
        PlayerError: None is.
    """
    if (player := find_player()) is None:
        raise PlayerError(f"speech cannot be played: install one of {PLAYER_NAMES}")
    return player


class Playback:
    """Plays the speech of one answer on its own thread: a crashed or hung player disturbs nothing else.

    It begins when the gateway advises, or as soon as all is there.  After a gap it collects more, once.

    Leaving a ``with`` block plays the rest; after an error it stops.

    Attributes:
        problem: Why not everything was played; None if nothing is wrong.
    """

    def __init__(self, player: Player) -> None:
        self.problem: str | None = None
        self._player = player
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._seconds = 0.0
        self._begin_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        # Nothing follows.
        self._complete = threading.Event()
        self._thread = threading.Thread(target=self._run, name="player", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        else:
            self.stop()

    @property
    def playing(self) -> bool:
        """Whether something is still playing."""
        return self._thread.is_alive()

    def show(self, event: ChatEvent) -> None:
        """Queue the audio of an event."""
        if isinstance(event, AudioEvent) and event.pcm:
            if not self._seconds:
                self._begin_at = time.monotonic() + event.start_delay_ms / 1000
                self._thread.start()
            self._seconds += event.sample_count / SAMPLE_RATE
            self._pieces.put(event.pcm)

    def end(self) -> None:
        """Nothing follows; play what is queued."""
        self._pieces.put(None)
        self._complete.set()

    def wait(self) -> None:
        """Wait until everything has been played."""
        self.end()
        if self.playing:
            self._thread.join(self._seconds + GRACE_S)
        if self.playing:
            self.problem = f"{self._player.program} does not end"
            self.stop()

    def stop(self) -> None:
        """Stop playing."""
        self._stopped.set()
        self.end()
        if self._process is not None:
            self._process.kill()
        if self.playing:
            self._thread.join()

    def _run(self) -> None:
        command = [self._player.program, *self._player.arguments]
        with tempfile.TemporaryFile() as said:
            try:
                self._process = subprocess.Popen(  # noqa: S603  A program of the user's own PATH.
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    bufsize=0,
                    # Ctrl-C is for us and must not end the player.
                    start_new_session=True,
                )
            except OSError as error:
                self.problem = f"{self._player.program} cannot be started: {error.strerror}"
                return
            if self._stopped.is_set():
                self._process.kill()
            complete = self._feed(self._process)
            status = self._process.wait()
            if not self._stopped.is_set() and not (status == 0 and complete):
                ending = f"{self._player.program} ended with exit status {status}"
                self.problem = ": ".join([ending, *_last_line(said)])

    def _feed(self, process: "subprocess.Popen[bytes]") -> bool:
        """Write everything to the player; False if it stopped reading."""
        if process.stdin is None:
            return False
        heard_until = self._begin_at
        self._wait_until(self._begin_at)
        rebuffered = False
        try:
            with process.stdin as pipe:
                while not self._stopped.is_set() and (piece := self._pieces.get()) is not None:
                    now = time.monotonic()
                    if now > heard_until > self._begin_at and not rebuffered:
                        rebuffered = True
                        self._wait_until(now + REBUFFER_S)
                    heard_until = max(heard_until, time.monotonic()) + len(piece) / SAMPLE_BYTES / SAMPLE_RATE
                    pipe.write(piece)
        except OSError as error:
            log.debug("%s stopped reading: %s", self._player.program, error)
            return False
        return True

    def _wait_until(self, moment: float) -> None:
        """Let pieces collect, until then or until all are there."""
        self._complete.wait(max(0.0, moment - time.monotonic()))


def _last_line(file: IO[bytes]) -> list[str]:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - MAX_SAID_BYTES))
    return file.read().decode(errors="replace").strip().splitlines()[-1:]
