"""Playing speech: real programs that read PCM, well and badly."""

import asyncio
import queue
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from omnirelay import AudioEvent, ChatResult, Client, TextEvent
from omnirelay.client import player
from omnirelay.client.player import PLAYERS, Playback, find_player
from omnirelay.errors import PlayerError
from tests.gateway.bench import Bench, Patch
from tests.gateway.http_bench import speaking
from tests.support.terminal import make_program

DEADLINE_S = 60.0
RNG = np.random.default_rng(0)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder that alone is searched for players."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def started() -> Playback:
    found = find_player()
    assert found is not None
    return Playback(found)


def samples(seconds: float) -> bytes:
    return RNG.uniform(-1, 1, round(24_000 * seconds)).astype("<f4").tobytes()


def test_the_first_of_the_known_players_is_taken(programs: Path) -> None:
    assert find_player() is None
    for known in reversed(PLAYERS):
        make_program(programs / known.program, f"echo knows {known.needs}")
        assert find_player() == known


def test_a_player_that_lacks_the_option_it_needs_is_none(programs: Path) -> None:
    make_program(programs / "pw-play", "echo knows --rate")
    assert find_player() is None
    make_program(programs / "pw-play", "echo knows --raw >&2; exit 1")
    found = find_player()
    assert found is not None
    assert found.program == "pw-play"
    (programs / "pw-play").write_bytes(b"\x7fELF, but not really")
    assert find_player() is None


@pytest.mark.parametrize("known", PLAYERS, ids=lambda known: known.program)
def test_every_player_gets_all_of_it_in_order(programs: Path, known: player.Player) -> None:
    script = f"printf '%s ' \"$@\" > '{programs}/arguments'; exec cat > '{programs}/played'"
    make_program(programs / known.program, script)
    pieces = [samples(0.24), samples(0), samples(0.48), samples(1.9)]
    with Playback(known) as playback:
        for number, piece in enumerate(pieces):
            playback.show(AudioEvent(number, piece))
            playback.show(TextEvent(token_ids=[1], text="silent"))
    assert playback.problem is None
    assert not playback.playing
    assert (programs / "played").read_bytes() == b"".join(pieces)
    assert "24000" in (programs / "arguments").read_text()


def test_without_sound_no_player_is_started(programs: Path) -> None:
    make_program(programs / "aplay", f"touch '{programs}/started'")
    with started() as playback:
        playback.show(AudioEvent(0, samples(0)))
    assert not playback.playing
    assert playback.problem is None
    assert not (programs / "started").exists()


def test_a_player_that_reads_nothing_delays_nobody_and_can_be_stopped(programs: Path) -> None:
    make_program(programs / "aplay", "exec sleep 60")
    playback = started()
    began = time.monotonic()
    for number in range(20):
        playback.show(AudioEvent(number, samples(8)))
    assert time.monotonic() - began < 20
    assert playback.playing
    playback.stop()
    assert not playback.playing
    assert playback.problem is None
    playback.stop()


def test_a_player_that_never_ends_is_ended(programs: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(player, "GRACE_S", 0.1)
    make_program(programs / "aplay", "cat > /dev/null; exec sleep 60")
    with started() as playback:
        playback.show(AudioEvent(0, samples(0.1)))
    assert playback.problem == "aplay does not end"
    assert not playback.playing


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo first >&2; echo no such device >&2; exit 1", "ended with exit status 1: no such device"),
        ("exec 0<&-; exit 0", "ended with exit status 0"),
        ("kill -9 $$", "ended with exit status -9"),
    ],
)
def test_a_player_that_dies_is_told_and_harms_nobody(programs: Path, script: str, problem: str) -> None:
    make_program(programs / "aplay", script)
    with started() as playback:
        for number in range(4):
            playback.show(AudioEvent(number, samples(4)))
    assert playback.problem == f"aplay {problem}"


def test_a_player_that_is_gone_is_told(programs: Path) -> None:
    make_program(programs / "aplay", "true")
    playback = started()
    (programs / "aplay").unlink()
    with playback:
        playback.show(AudioEvent(0, samples(0.1)))
    assert playback.problem == "aplay cannot be started: No such file or directory"


def test_an_error_ends_the_playing(programs: Path) -> None:
    make_program(programs / "aplay", "exec sleep 60")
    playback = started()

    def fail() -> None:
        with playback:
            playback.show(AudioEvent(0, samples(0.1)))
            raise ValueError("of the answer")

    with pytest.raises(ValueError, match="of the answer"):
        fail()
    assert not playback.playing
    assert not [thread for thread in threading.enumerate() if thread.name == "player"]


class Waits:
    """What a playback would wait for; it goes on when a test lets it."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.now = time.monotonic()
        self.asked: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.go: queue.SimpleQueue[None] = queue.SimpleQueue()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Playback, "_wait_until", self._wait)

    def _wait(self, moment: float) -> None:
        self.asked.put(moment - self.now)
        self.go.get(timeout=DEADLINE_S)


def wait_for_size(path: Path, size: int) -> None:
    late = time.perf_counter() + DEADLINE_S
    while not path.exists() or path.stat().st_size < size:
        assert time.perf_counter() < late
        threading.Event().wait(0.005)


def test_playing_begins_when_the_gateway_advises(programs: Path, monkeypatch: Patch) -> None:
    waits, played = Waits(monkeypatch), programs / "played"
    make_program(programs / "aplay", f"exec cat > '{played}'")
    first, second = samples(0.25), samples(0.25)
    with started() as playback:
        playback.show(AudioEvent(0, first, start_delay_ms=1500))
        assert waits.asked.get(timeout=DEADLINE_S) == pytest.approx(1.5)
        playback.show(AudioEvent(1, second))
        assert not played.exists() or not played.read_bytes()
        waits.go.put(None)
        wait_for_size(played, len(first + second))
    assert played.read_bytes() == first + second
    assert waits.asked.empty()


def test_after_its_first_gap_it_collects_more(programs: Path, monkeypatch: Patch) -> None:
    waits, played = Waits(monkeypatch), programs / "played"
    make_program(programs / "aplay", f"exec cat > '{played}'")
    pieces = [samples(0.25) for _ in range(4)]
    with started() as playback:
        waits.go.put(None)
        for number, piece in enumerate(pieces):
            if number > 0:
                # The first comes in time, the others after a gap.
                waits.now += 0.2 if number == 1 else 60
            playback.show(AudioEvent(number, piece))
            if number == 2:
                assert waits.asked.get(timeout=DEADLINE_S) == pytest.approx(0)
                assert waits.asked.get(timeout=DEADLINE_S) == pytest.approx(player.REBUFFER_S)
                assert len(played.read_bytes()) == len(pieces[0]) + len(pieces[1])
                waits.go.put(None)
            wait_for_size(played, sum(map(len, pieces[: number + 1])))
    assert played.read_bytes() == b"".join(pieces)
    assert waits.asked.empty()


def test_what_is_there_to_its_end_is_played_at_once(programs: Path) -> None:
    make_program(programs / "aplay", f"exec cat > '{programs / 'played'}'")
    began = time.monotonic()
    with started() as playback:
        playback.show(AudioEvent(0, samples(0.1), start_delay_ms=60_000))
    assert time.monotonic() - began < 30
    assert (programs / "played").stat().st_size == 4 * 2400


async def test_the_client_plays_an_answer(programs: Path, tcp: Bench) -> None:
    make_program(programs / "aplay", f"exec cat > '{programs / 'played'}'")
    said = [np.frombuffer(samples(seconds), "<f4") for seconds in (0.25, 0.5)]

    async with speaking(tcp, "How are you?", said):
        result = await asyncio.to_thread(played, tcp.listen)
        assert result.text == "How are you?"
        assert (programs / "played").read_bytes() == result.waveform == b"".join(map(bytes, said))
        make_program(programs / "aplay", "echo no such device >&2; exit 1")
        with pytest.raises(PlayerError, match="no such device"):
            await asyncio.to_thread(played, tcp.listen)
        (programs / "aplay").unlink()
        with pytest.raises(PlayerError, match="install one of paplay"):
            await asyncio.to_thread(played, tcp.listen)


def played(address: str) -> ChatResult:
    with Client(address) as client:
        return client.chat("Hi").play()
