"""The processes of stages: a line when one cannot start, and the end of any process, at whatever moment."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
import zmq

from shared.messages import STAGES
from shared.transport.keys import make_keys
from tests.shared.support import ANY_PORT, endpoint, free_address, wait_until
from tests.support.children import ROOT, Child, python
from tests.support.http import get
from tests.support.stack import inherited

ECHO = """
import os
import select
import threading
from shared.stage.process import run_stage
from shared.messages import Token2WavInput
from tests.shared.stages import EchoService

def build(config, model, context, gateway):
    ids = [str(each.native_id) for each in threading.enumerate() if each.name == "heartbeat"]
    os.write(1, " ".join(ids).encode() + b"\\n")
    # Until the test closes its end.  Not one long read: a signal that comes just before it would not end it.
    while not select.select([0], [], [], 0.02)[0]:
        pass
    service = EchoService()
    service.gateway = gateway
    return service, None

run_stage("token2wav", Token2WavInput, build)
"""


def environment(model: Path | str, **overrides: str) -> dict[str, str]:
    no_endpoints = {f"OMNIRELAY_STAGES__{name.upper()}__HTTP": "null" for name in STAGES}
    ours = {"OMNI_MODEL": str(model), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return os.environ | no_endpoints | ours | overrides


def run_talker(*arguments: str, model: Path | str, **overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.talker", *arguments],
        env=environment(model, **overrides),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def niceness(pid: int) -> dict[int, int]:
    """That of each thread of a process."""
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    return {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}


def test_an_address_in_use_ends_the_stage_with_one_line(tiny_checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        places = {"INBOX": free_address(), "HTTP": address}
        overrides = {f"OMNIRELAY_STAGES__TALKER__{name}": place for name, place in places.items()}
        ended = run_talker(model=tiny_checkpoint, **overrides)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"address_in_use: {address} is in use" in line
    assert " ERROR talker " in line
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [\nb: {", "config_invalid: {path} is not valid YAML: while parsing a flow"),
        (
            "{gateway: {control: 'tcp://*:5561'}, security: {internal_network: true}}",
            r"config_invalid: cannot connect to tcp://\*:5561",
        ),
    ],
)
def test_a_bad_configuration_ends_the_stage_with_one_line(tmp_path, tiny_checkpoint, text, problem):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    inbox = {"OMNIRELAY_STAGES__TALKER__INBOX": free_address()}
    ended = run_talker("--config", str(path), model=tiny_checkpoint, **inbox)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert re.search(problem.format(path=re.escape(str(path))), line)


def test_a_damaged_file_ends_the_stage_with_one_line(tmp_path: Path, tiny_checkpoint: Path) -> None:
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    os.truncate(model / "spk_dict.pt", (model / "spk_dict.pt").stat().st_size // 2)
    ended = run_talker(model=model, OMNIRELAY_STAGES__TALKER__INBOX=free_address())
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    problem = f"checkpoint_invalid: the checkpoint in {model} is damaged: spk_dict.pt is cut short or damaged"
    assert problem in line


def start_echo(
    model: Path, *arguments: str, program: str = ECHO, http: str = "null", **overrides: str
) -> Child[str]:
    """Start a stage that echoes what it is given; it loads until its standard input is closed."""
    names = ("GATEWAY__EVENTS", "GATEWAY__CONTROL", "STAGES__TOKEN2WAV__INBOX")
    addresses = {f"OMNIRELAY_{name}": free_address() for name in names}
    addresses["OMNIRELAY_STAGES__TOKEN2WAV__HTTP"] = http
    return Child(
        python("-c", program, *arguments),
        env=environment(model, **(addresses | overrides)),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_stage_answers_while_it_loads_serves_and_stops_cleanly(tiny_checkpoint: Path) -> None:
    inbox, http = free_address(), free_address()
    process = start_echo(
        tiny_checkpoint,
        http=http,
        OMNIRELAY_STAGES__TOKEN2WAV__INBOX=inbox,
        OMNIRELAY_STAGES__TOKEN2WAV__HEARTBEAT_S="0.05",
        OMNIRELAY_STAGES__TOKEN2WAV__NICENESS="7",
    )
    with process:
        heart = int(process.stdout.readline())
        seen = [process.stderr.readline()]
        assert get(http, "/livez").status == 200
        loading = get(http, "/readyz")
        assert (loading.status, loading.json["reason"]) == (503, "the model is being loaded")
        process.stdin.close()
        seen.append(process.stderr.readline())
        wait_until(lambda: get(http, "/readyz").status == 200)
        threads = niceness(process.pid)
        assert threads[process.pid] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
        assert threads[heart] == os.getpriority(os.PRIO_PROCESS, 0), "those that send are not slowed down"
        told = get(http, "/metrics").metrics
        assert told.keys() >= {
            "omnirelay_stage_info",
            "omnirelay_edge_backlog_bytes",
            "process_cpu_seconds_total",
        }
        process.send_signal(signal.SIGTERM)
        seen += process.stderr.readlines()
        assert process.wait(timeout=60) == 0, seen
    assert f"loading {tiny_checkpoint}" in seen[0]
    assert seen[1].endswith(f"ready on {inbox}\n")
    assert [line.rpartition(": ")[2] for line in seen[2:]] == ["stopping\n", "stopped\n"]


def test_a_stage_that_is_sent_sighup_stays_and_reads_where_its_gateways_are(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("gateway: {}")
    process = start_echo(tiny_checkpoint, "--config", str(path))
    with process, zmq.Context() as context, context.socket(zmq.ROUTER) as gateway:
        try:
            process.stdout.readline()
            assert "loading" in process.stderr.readline()
            path.write_text("gateway: {nothing: 1}")
            process.send_signal(signal.SIGHUP)
            line = process.stderr.readline()
            assert "the gateways' addresses stay as they are" in line
            assert "gateway.nothing: no such key" in line
            process.stdin.close()
            assert "ready on" in process.stderr.readline()
            gateway.bind(ANY_PORT)
            place = {"control": endpoint(gateway), "events": free_address()}
            path.write_text(yaml.safe_dump({"gateway": {"others": [place]}}))
            process.send_signal(signal.SIGHUP)
            assert "read the gateways' addresses again" in process.stderr.readline()
            assert place["control"] in process.stderr.readline()
            assert gateway.poll(60_000), "no heartbeat came"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


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


@pytest.mark.long
@pytest.mark.parametrize(("what", "every"), [("stage", 97), ("gateway", 149)])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_process_ends_whenever_it_is_told_to(
    tiny_checkpoint: Path, tmp_path: Path, what: str, every: int, number: str
) -> None:
    """With keys, so that all sockets and threads are there that can be."""
    make_keys(tmp_path / "keys", replace=False)
    ours = ("GATEWAY__LISTEN", "GATEWAY__HTTP", "GATEWAY__MONITOR", "GATEWAY__EVENTS", "GATEWAY__CONTROL")
    theirs = ("STAGES__TOKEN2WAV__INBOX", "STAGES__TOKEN2WAV__HTTP")
    variables = {f"OMNIRELAY_{name}": free_address() for name in (*ours, *theirs)}
    variables |= {"OMNI_MODEL": str(tiny_checkpoint), "OMNIRELAY_SECURITY__KEYS": str(tmp_path / "keys")}
    done = subprocess.run(
        python("-m", "tests.support.stopping", what, number, str(every)),
        env=inherited() | variables | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
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
    with start_echo(tiny_checkpoint, program=STUBBORN) as process:
        assert process.stdout.readline()
        process.send_signal(number)
        assert process.wait(timeout=60) == 0


def test_a_process_that_cannot_close_what_it_has_says_where_it_is_and_ends() -> None:
    with Child(
        python("-c", HANGING), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
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
