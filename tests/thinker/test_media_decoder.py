"""Decoder processes: how they start, fail, and end."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from omnirelay.errors import BusyError, MediaError, MediaTooLargeError
from services.thinker.media.decoded import DecodedAudio, DecodedImage
from services.thinker.media.decoder import WORKER, MediaDecoder
from services.thinker.media.pipe import MAX_HEADER_BYTES, STARTS, DecodeJob, Pipe
from tests.shared.support import wait_until
from tests.support.children import Child
from tests.support.decoding import LIMITS, decoding, limits, nbytes
from tests.support.media import clip, encode_image, picture, spoken

DEADLINE_S = 60.0


FAKE = """
import os, socket, struct, sys, time
import msgspec
connection = socket.socket(fileno=int(sys.argv[1]))

def take(size):
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data)) or sys.exit()
    return data

def read():
    header = msgspec.msgpack.decode(take(struct.unpack(">I", take(4))[0]))
    take(header.get("size", 0))

def say(header, data=b""):
    encoded = msgspec.msgpack.encode(header)
    connection.sendall(struct.pack(">I", len(encoded)) + encoded + data)

def start():
    read()
    say({"type": "ready"})

"""
"""Beginning of a child of the test's."""


def fake(script: str) -> list[str]:
    """The command of a child that runs a script of the test's."""
    return [sys.executable, "-c", FAKE + script]


_OTHERS: set[psutil.Process] = set()
"""Children of other tests, such as a whole stack that lives as long as the session."""


@pytest.fixture(autouse=True)
def _know_the_others() -> None:
    _OTHERS.clear()
    _OTHERS.update(psutil.Process().children())


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [each for each in found if each not in _OTHERS and each.status() != psutil.STATUS_ZOMBIE]


def only_child() -> psutil.Process:
    (child,) = [child for child in children() if "services.thinker.media.worker" in child.cmdline()]
    return child


@cache
def slow_picture() -> bytes:
    """A small file that takes a while to decode."""
    return encode_image(Image.new("RGB", (4000, 4000)), compress_level=1)


def test_nothing_is_left_behind():
    process = psutil.Process()
    with decoding() as decoder:
        # What the standard library opens once, such as /dev/null, is open from here on.
        decoder.decode("audio", spoken(), name="audio 1")
    before = process.num_fds(), threading.active_count(), children()
    for _ in range(3):
        with decoding() as decoder:
            decoder.decode("audio", spoken(), name="audio 1")
            with pytest.raises(MediaError):
                decoder.decode("image", b"x", name="image 1")
    with decoding():
        pass
    assert (process.num_fds(), threading.active_count(), children()) == before


def test_the_child_starts_when_it_is_needed_and_is_used_again_by_all_threads():
    before = len(children())
    with decoding() as decoder, ThreadPoolExecutor(8) as pool:
        assert len(children()) == before
        decoder.decode("image", picture(), name="image 1")
        first = only_child().pid
        heard = [
            pool.submit(decoder.decode, "audio", memoryview(spoken()), name="audio 1") for _ in range(32)
        ]
        assert len({nbytes(each.result(DEADLINE_S)) for each in heard}) == 1
        assert only_child().pid == first


def test_the_child_has_nothing_of_the_parents_and_little_to_break():
    with socket.socket() as listener, decoding() as decoder:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.set_inheritable(True)
        decoder.decode("audio", spoken(), name="audio 1")
        child = only_child()
        assert child.net_connections() == [] or {item.family for item in child.net_connections()} == {
            socket.AF_UNIX
        }
        assert child.num_fds() == 4
        maps = {mapped.path for mapped in child.memory_maps()}
        assert not any("torch" in path or "vllm" in path for path in maps)
        assert resource.prlimit(child.pid, resource.RLIMIT_CORE) == (0, 0)
        soft, hard = resource.prlimit(child.pid, resource.RLIMIT_DATA)
        assert 0 < soft == hard < 4 * 2**30
        assert child.environ()["OPENBLAS_NUM_THREADS"] == "1"
        assert child.num_threads() < 3 + (os.cpu_count() or 1)


def test_ctrl_c_does_not_end_the_child():
    with decoding() as decoder:
        decoder.decode("audio", spoken(), name="audio 1")
        child = only_child()
        child.send_signal(signal.SIGINT)
        decoder.decode("audio", spoken(), name="audio 1")
        assert only_child() == child


def test_a_file_outlives_the_death_of_a_child_that_was_used_before(tmp_path: Path):
    dies = f"""
start()
while True:
    read()
    say({{'type': 'done', 'samples': 1}}, struct.pack('<f', 0.5))
    if not os.path.exists({str(tmp_path / "died")!r}):
        read()
        open({str(tmp_path / "died")!r}, "w")
        os.kill(os.getpid(), 9)
"""
    with decoding(fake(dies)) as decoder:
        for _ in range(3):
            sound = decoder.decode("audio", b"data", name="audio 1")
            assert isinstance(sound, DecodedAudio)
            assert sound.samples.tolist() == [0.5]
        assert (tmp_path / "died").exists()


def test_a_child_may_be_killed_at_any_moment():
    with decoding() as decoder, ThreadPoolExecutor(1) as pool:
        for delay in (0.0, 0.05, 0.2):
            for used in (False, True):
                if used:
                    decoder.decode("image", picture(), name="image 1")
                answer = pool.submit(decoder.decode, "image", slow_picture(), name="image 1")
                wait_until(lambda: len(children()) == 1)
                threading.Event().wait(delay)
                for child in children():
                    child.kill()
                error = answer.exception(DEADLINE_S)
                assert error is None or str(error) == "image 1: its decoder was killed by SIGKILL"
                assert error is None or not used


def test_a_child_that_died_while_it_had_nothing_to_do_is_replaced():
    with decoding() as decoder:
        for _ in range(3):
            decoder.decode("audio", spoken(), name="audio 1")
            child = only_child()
            child.kill()
            child.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("os.kill(os.getpid(), 9)", "its decoder was killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "its decoder was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 40)", "its decoder was killed by signal 40"),
        ("sys.exit(3)", "its decoder ended with exit status 3"),
    ],
)
def test_a_file_that_a_fresh_child_dies_of_is_refused(ending, told):
    with decoding(fake(f"start(); read(); {ending}")) as decoder:
        for name in ("audio 1", "audio 2"):
            with pytest.raises(MediaError, match=rf"^{name}: {told}"):
                decoder.decode("audio", spoken(), name=name)
        assert children() == []


def test_a_child_that_does_not_start_is_told_of():
    with (
        decoding(fake("sys.exit(4)")) as decoder,
        pytest.raises(MediaError, match="ended with exit status 4"),
    ):
        decoder.decode("audio", spoken(), name="audio 1")
    missing = MediaDecoder(LIMITS, command=["/nowhere/python"])
    with pytest.raises(BusyError, match="no decoder starts"):
        missing.decode("audio", spoken(), name="audio 1")
    missing.close()


def test_a_file_that_takes_too_long_is_refused_and_the_next_is_not():
    with decoding(timeout_s=5.0) as decoder:
        decoder.decode("image", picture(), name="image 1")
        child = only_child()
        child.suspend()
        with pytest.raises(MediaError, match=r"^image 2: it took longer than 5 s to decode"):
            decoder.decode("image", picture(), name="image 2")
        assert not child.is_running()
        assert nbytes(decoder.decode("image", picture(), name="image 3"))


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("start(); read(); time.sleep(600)", r"took longer than 0\.2 s"),
        ("start(); time.sleep(600)", r"took longer than 0\.2 s"),
        ("time.sleep(600)", r"it has not started within 0\.1 s"),
    ],
)
def test_a_child_that_hangs_or_does_not_get_ready_is_killed(monkeypatch: pytest.MonkeyPatch, script, told):
    if not script.startswith("start"):
        monkeypatch.setattr("services.thinker.media.decoder._START_S", 0.1)
    with decoding(fake(script), timeout_s=0.2) as decoder:
        with pytest.raises(MediaError, match=told):
            decoder.decode("image", slow_picture() * 10, name="image 1")
        assert children() == []


def test_a_file_that_needs_too_much_memory_is_refused_and_the_next_is_not():
    bomb = clip()
    count = bomb.index(b"stts") + 8
    bomb = bomb[:count] + b"\x7f\xff\xff\xff" + bomb[count + 4 :]
    with decoding(max_image_pixels=1_000_000, max_decoded_bytes=10_000_000) as decoder:
        for used in (False, True):
            with pytest.raises(MediaTooLargeError, match=r"^video 1: it needs more memory than allowed"):
                decoder.decode("video", bomb, name="video 1")
            assert nbytes(decoder.decode("video", clip(), name="video 2")), used
            assert psutil.Process(only_child().pid).memory_info().rss < 500 * 2**20


def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.thinker.media.decoder._END_S", 0.2)
    script = "start(); read(); say({'type': 'refused', 'reason': 'invalid', 'message': 'x'}); time.sleep(600)"
    with decoding(fake(script)) as decoder:
        with pytest.raises(MediaError, match="audio 1: x"):
            decoder.decode("audio", spoken(), name="audio 1")
        assert len(children()) == 1
        decoder.close()
        assert children() == []


def test_closing_ends_a_decode_in_progress():
    hung = "start(); read(); say({'type': 'done', 'samples': 10}); time.sleep(600)"
    with decoding(fake(hung)) as decoder, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(decoder.decode, "audio", spoken(), name=f"audio {i}") for i in range(2)]
        wait_until(lambda: len(children()) == 1)
        decoder.close()
        for answer in answers:
            with pytest.raises(MediaError, match=r"audio \d: decoding was stopped"):
                answer.result(DEADLINE_S)
        assert children() == []
        decoder.close()
        with pytest.raises(MediaError, match="audio 3: decoding was stopped"):
            decoder.decode("audio", spoken(), name="audio 3")


def test_closing_at_any_moment_leaves_nothing():
    for delay in (0.0, 0.01, 0.05, 0.1, 0.15, 0.2):
        with decoding() as decoder, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(decoder.decode, "image", slow_picture(), name="image 1")
            threading.Event().wait(delay)
            decoder.close()
            assert children() == []
            error = answer.exception(DEADLINE_S)
            assert error is None or str(error) == "image 1: decoding was stopped"


NONSENSE = {
    "no msgpack": "connection.sendall(b'\\0\\0\\0\\1\\xc1')",
    "a header without an end": "connection.sendall(b'\\xff\\xff\\xff\\xff')",
    "a long header": f"connection.sendall(struct.pack('>I', {MAX_HEADER_BYTES + 1}))",
    "noise": "connection.sendall(os.urandom(1000))",
    "another type": "say({'type': 'ready'})",
    "an unknown field": "say({'type': 'done', 'samples': 10, 'more': 1})",
    "no samples": "say({'type': 'done'})",
    "zero samples": "say({'type': 'done', 'samples': 0})",
    "negative samples": "say({'type': 'done', 'samples': -5})",
    "too many samples": "say({'type': 'done', 'samples': 60 * 16000 + 2})",
    "far too many samples": "say({'type': 'done', 'samples': 2**31 - 1})",
    "pixels of a sound": "say({'type': 'done', 'samples': 10, 'pixels': [10, 10, 3]}, bytes(1000))",
    "infinite samples": "say({'type': 'done', 'samples': 2}, struct.pack('<ff', 1, float('inf')))",
    "samples that are no numbers": "say({'type': 'done', 'samples': 2}, struct.pack('<ff', 1, float('nan')))",
    "a long message": "say({'type': 'refused', 'reason': 'invalid', 'message': 'x' * 1001})",
    "an unknown reason": "say({'type': 'refused', 'reason': 'why not', 'message': 'x'})",
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_child_that_talks_nonsense_is_not_believed(what):
    with decoding(fake("start(); read(); " + NONSENSE[what] + "; time.sleep(600)")) as decoder:
        with pytest.raises(MediaError, match=r"^audio 1: its decoder gave an answer that cannot be"):
            decoder.decode("audio", spoken(), name="audio 1")
        assert children() == []


@pytest.mark.parametrize(
    ("kind", "shape", "samples"),
    [
        ("image", None, None),
        ("image", [10, 10, 3], 10),
        ("image", [10, 10], None),
        ("image", [10, 10, 4], None),
        ("image", [10, 10, 3, 3], None),
        ("image", [0, 10, 3], None),
        ("image", [7, 10, 3], None),
        ("image", [10, 2001, 3], None),
        ("image", [2**31 - 1, 2**31 - 1, 3], None),
        ("image", [8000, 8000, 3], None),
        ("video", [10, 10, 3], None),
        ("video", [3, 10, 10, 3], None),
        ("video", [122, 10, 10, 3], None),
        ("video", [100, 1000, 1000, 3], None),
        ("video", [4, 10, 10, 3], 10),
    ],
)
def test_shapes_that_cannot_be_are_refused_before_memory_is_taken(kind, shape, samples):
    script = (
        f"start(); read(); say({{'type': 'done', 'pixels': {shape}, 'samples': {samples}}}); time.sleep(600)"
    )
    with (
        decoding(fake(script)) as decoder,
        pytest.raises(MediaError, match=r"^x 1: its decoder gave an answer"),
    ):
        decoder.decode(kind, b"data", name="x 1")


def test_what_a_child_says_in_words_is_shown_as_text():
    script = (
        "start(); read(); say({'type': 'refused', 'reason': 'too_large', 'message': 'a\\x1b[2Jb'}); read()"
    )
    with decoding(fake(script)) as decoder:
        with pytest.raises(MediaTooLargeError) as error:
            decoder.decode("audio", b"data", name="audio 1")
        assert str(error.value) == "audio 1: 'a\\x1b[2Jb'"


def test_what_a_child_sends_is_what_comes_out():
    script = "start(); read(); say({'type': 'done', 'pixels': [8, 9, 3]}, bytes(range(216))); read()"
    with decoding(fake(script)) as decoder:
        image = decoder.decode("image", b"data", name="image 1")
        assert isinstance(image, DecodedImage)
        assert np.array_equal(image.pixels, np.arange(216, dtype=np.uint8).reshape(8, 9, 3))


PARENT = """
import os, signal
from omnirelay.errors import MediaError
from services.thinker.media.decoder import MediaDecoder
from shared.messages import MediaKind
from tests.support.decoding import LIMITS
decoder = MediaDecoder(LIMITS)
try:
    decoder.decode("audio", b"no sound", name="audio 1")
except MediaError:
    print(decoder._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_child_ends_when_its_parent_is_gone():
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    child = int(done.stdout)
    wait_until(lambda: not psutil.pid_exists(child))


def test_a_child_whose_parent_does_not_end_it_ends_itself():
    ours, theirs = socket.socketpair()
    with ours, theirs, Child([*WORKER, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as child:
        pipe = Pipe(ours)
        pipe.set_deadline(DEADLINE_S)
        pipe.send(limits(timeout_s=0.1))
        pipe.receive(STARTS)
        # It has more to say than fits in the socket, and nobody reads.
        pipe.send(DecodeJob("image", len(slow_picture())), slow_picture())
        assert child.wait(DEADLINE_S) == -signal.SIGALRM
