"""The gateway as a process, and the launcher with processes in the place of the stages."""

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.request import urlopen

import msgspec
import pytest

from omnirelay import Client, StatusReport
from omnirelay.cli.main import build_parser, main
from omnirelay.errors import CancelledRequestError, StageStartError
from ops import child, launcher
from ops import restart as replacing
from ops.addresses import overrides
from ops.doctor import network
from ops.launcher import Stack, running
from shared.config import DEFAULT_CHECKPOINT, Config, load_config
from shared.config.gateway import PORTS_APART
from shared.messages import STAGES, Role
from shared.real_time import set_realtime_priority
from tests.gateway.bench import Output, Patch
from tests.gateway.conftest import KEYS
from tests.support.children import Child
from tests.support.ports import free_ports, has_ipv6
from tests.support.processes import wait_until
from tests.support.stack import COMMAND

GATEWAY_KEYS = [key for key in KEYS if key.startswith("GATEWAY")]
OFFSET = 33_000


def start(*arguments: str) -> Child[str]:
    return Child(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_until(process: Child[str], word: str) -> list[str]:
    """Read lines up to one that holds a word; the test's own timeout bounds the wait."""
    lines: list[str] = []
    stdout = process.stdout
    while stdout is not None and (line := stdout.readline()):
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"no {word!r} in {''.join(lines)}")


def output_of(*arguments: str, status: int = 1) -> str:
    """What a process writes that ends with a status."""
    with start(*arguments) as process:
        told, _ = process.communicate(timeout=60)
        assert process.returncode == status, told
    assert "Traceback" not in told
    return told


def end(process: Child[str], number: signal.Signals = signal.SIGTERM, status: int = 0) -> str:
    """Tell a process to end, which it must in order; gives what else it writes."""
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == status, told
    assert "killed" not in told
    assert "Traceback" not in told
    return told


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Stack, "asyncio.Task[None]"]]:
    """A stack of this process that is ready, and the task that starts its processes again."""
    stack = Stack(load_config(), None, lambda *_: None)
    async with running(stack):
        watch = asyncio.create_task(stack.watch())
        yield stack, watch
        watch.cancel()


@pytest.fixture
def said(monkeypatch: Patch) -> list[str]:
    """What launchers and children of this process announce."""
    lines: list[str] = []
    for module in (launcher, child):
        monkeypatch.setattr(module, "announce", lambda line, *_: lines.append(line))
    return lines


@contextmanager
def up() -> Iterator[tuple["Child[str]", list[str]]]:
    """A stack that is ready, with what it has written; at the end it is stopped, and must stop in order."""
    with start("omnirelay.cli", "up") as process:
        yield process, (lines := read_until(process, "ready: tcp://"))
        rest = end(process, signal.SIGINT)
        assert rest.endswith("stopped\n")
        lines += rest.splitlines(keepends=True)


def children_of(process: "subprocess.Popen[Any]") -> set[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return {int(each) for each in listed.split()}


def gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_gateway_process_starts_and_stops(place: Path, monkeypatch: Patch) -> None:
    with ThreadPoolExecutor(1) as probe:
        may_go_first = probe.submit(set_realtime_priority).result()
    with start("gateway") as process:
        read_until(process, "listening on")
        policy = os.sched_getscheduler(process.pid) & ~os.SCHED_RESET_ON_FORK
        assert policy == (os.SCHED_RR if may_go_first else os.SCHED_OTHER)
        assert "address_in_use" in output_of("gateway")
        end(process)
    monkeypatch.setenv("OMNI_MODEL", "./nowhere")
    assert "checkpoint_invalid: no checkpoint in nowhere" in output_of("gateway")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("gateway.process, gateway.__main__, omnirelay.cli.main", "services checkpoint aiohttp PIL"),
        ("ops.doctor.command", "shtab"),
    ],
)
def test_neither_gateway_nor_doctor_loads_a_model_library(modules: str, unwanted: str) -> None:
    code = (
        f"import sys, {modules};"
        "names = {name.split('.')[0] for name in sys.modules};"
        f"print(names.intersection('torch vllm transformers huggingface_hub {unwanted}'.split()))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown == "set()\n"


@pytest.mark.parametrize(("grace_s", "number"), [(60, signal.SIGINT), (1, signal.SIGTERM)])
def test_up_waits_for_requests_unless_it_is_told_twice_or_they_take_too_long(
    place: Path, monkeypatch: Patch, grace_s: int, number: signal.Signals
) -> None:
    monkeypatch.setenv("FAKE_THINKER", "mute")
    monkeypatch.setenv("OMNIRELAY_GATEWAY__DRAIN_S", str(grace_s))
    with start("omnirelay.cli", "up") as process:
        read_until(process, "ready: tcp://")
        with Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"], reconnect_s=0) as client:
            answer = client.chat("Hello")
            wait_until(lambda: client.status().requests["thinking"] == 1, "the request")
            began = time.monotonic()
            process.send_signal(number)
            if grace_s == 60:
                (told,) = [line for line in read_until(process, "stopping ...") if "stopping ..." in line]
                assert "up to 60 s; once more ends them now" in told
                read_until(process, "1 open requests may finish within 60 s")
                process.send_signal(number)
            with pytest.raises(CancelledRequestError, match="shutting down"):
                answer.result()
            assert grace_s == 60 or time.monotonic() - began >= grace_s
        rest, _ = process.communicate(timeout=60)
        assert (process.returncode, "killed" in rest) == (0, False), rest


def test_a_gateway_that_was_frozen_blames_nobody_nor_does_one_end_that_is_to_reload(
    place: Path, capsys: Output
) -> None:
    with up() as (process, lines), Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"]) as client:
        pid = client.status().gateway.pid
        children = children_of(process)
        process.send_signal(signal.SIGHUP)
        read_until(process, "nothing to reload")
        os.kill(pid, signal.SIGSTOP)
        # Longer than the stages may be silent.
        assert main(["status", "--gateway", os.environ["OMNIRELAY_GATEWAY__LISTEN"]]) == 1
        assert "has not answered within 5 s: it hangs, or is stopped" in capsys.readouterr().err
        config = load_config()
        (ports,) = network.check_ports(config, network.ask_gateway(config))
        assert all(f"{name}, pid" in ports.what for name in ("gateway", *STAGES))
        answer = client.chat("Hello")
        os.kill(pid, signal.SIGCONT)
        assert answer.result().text
        assert client.status().ready
        assert children_of(process) == children
    assert "was suspended for" in "".join(lines)
    assert "does not answer any more" not in "".join(lines)


def pid_at(address: str) -> int:
    with Client(address) as client:
        return client.status().gateway.pid


def test_up_starts_as_many_replicas_as_are_wanted_and_replaces_gateways_one_after_the_other(
    place: Path, monkeypatch: Patch
) -> None:
    for name, count in (("STAGES__TALKER", "2"), ("STAGES__THINKER", "2"), ("GATEWAY", "2")):
        monkeypatch.setenv(f"OMNIRELAY_{name}__REPLICAS", count)
    first = os.environ["OMNIRELAY_GATEWAY__LISTEN"]
    host, _, port = first.rpartition(":")
    second = f"{host}:{int(port) + PORTS_APART}"
    with up() as (process, lines):
        greetings = {line.partition(" hello")[0] for line in lines if line.endswith(" says hello\n")}
        assert len(greetings) == 5
        assert {"[talker] talker says", "[talker 2] talker says"} <= greetings
        assert any("the talker 2 is ready" in line for line in lines)
        assert f"{second}, http://127.0.0.1:" in lines[-1]
        with Client(first) as client:
            assert len({stage.inbox for stage in client.status().stages}) == 5
            answers = [client.chat("Hello", speech=False) for _ in range(8)]
            assert all(answer.result().text for answer in answers)
        for name, address in (("gateway", first), ("gateway 2", second)):
            os.kill(pid_at(address), signal.SIGTERM)
            read_until(process, f"the {name} ended with exit status 0: it is started again")
            read_until(process, "listening on")


def test_all_addresses_may_be_of_ipv6(place: Path, monkeypatch: Patch) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    for key in KEYS:
        address = os.environ[f"OMNIRELAY_{key}"].replace("127.0.0.1", "[::1]")
        monkeypatch.setenv(f"OMNIRELAY_{key}", address)
    # As on another machine: the address from which the gateway hears it.
    inbox = os.environ["OMNIRELAY_STAGES__TALKER__INBOX"].replace("[::1]", "[::]")
    monkeypatch.setenv("OMNIRELAY_STAGES__TALKER__INBOX", inbox)
    monkeypatch.setenv("OMNIRELAY_SECURITY__INTERNAL_NETWORK", "true")
    with up(), Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"]) as client:
        assert client.chat("Hello").result().text
        assert {stage.inbox for stage in client.status().stages if stage.name == "talker"} == {
            inbox.replace("[::]", "[::1]")
        }


def test_restart_replaces_every_process_while_requests_are_answered(place: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("OMNIRELAY_STAGES__TALKER__REPLICAS", "2")
    with up() as (process, _), ThreadPoolExecutor(1) as other:
        before = children_of(process)
        with Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"]) as client:
            restarting = other.submit(main, ["restart"])
            while not restarting.done():
                assert client.chat("Hello", speech=False).result().text
            assert restarting.result() == 0
            assert client.status().ready
        assert len(children_of(process)) == len(before)
        assert children_of(process).isdisjoint(before)


async def test_restart_passes_over_what_has_ended_by_itself(
    place: Path, monkeypatch: Patch, capsys: Output
) -> None:
    monkeypatch.setenv("OMNIRELAY_STAGES__TALKER__REPLICAS", "2")
    replaced, us = replacing._replaced, os.getpid()

    async def and_lose_the_other(config: Config, launcher: int, kind: Role, before: int, number: int) -> None:
        await replaced(config, launcher, kind, before, number)
        for pid in first - {before}:
            os.kill(pid, signal.SIGKILL)
            await replaced(config, launcher, kind, pid, number)

    monkeypatch.setattr(replacing, "_launcher", lambda _: us)
    monkeypatch.setattr(replacing, "_replaced", and_lose_the_other)
    async with watched():
        first = set(replacing._children(us, "talker"))
        await replacing._restart(load_config(), ["talker"])
        assert first.isdisjoint(replacing._children(us, "talker"))
        with monkeypatch.context() as patch:
            patch.setattr("os.kill", Mock(side_effect=PermissionError))
            assert await asyncio.to_thread(main, ["restart", "talker"]) == 1
    assert "the stack is another user's" in capsys.readouterr().err


def test_an_installed_command_needs_no_output_and_nothing_of_the_working_folder(place: Path) -> None:
    (place / "checkpoint.py").write_text("raise SystemExit(7)")
    assert subprocess.run(["sh", "-c", '"$0" checkpoint new >&-', COMMAND], check=False).returncode == 0
    assert (place / "new" / "config.json").is_file()


def test_restart_leaves_what_was_not_started_by_up(place: Path, capsys: Output) -> None:
    with start("gateway") as process:
        read_until(process, "listening on")
        assert main(["restart", "gateway"]) == 1
        assert "was not started by `omnirelay up`" in capsys.readouterr().err
        assert process.poll() is None
        end(process)
    assert main(["restart", "gateway"]) == 1
    assert "no gateway answers" in capsys.readouterr().err


def test_up_stops_although_nobody_reads_what_it_says(place: Path) -> None:
    """As with ``omnirelay up | tee log``, where Ctrl-C ends the reader too."""
    with start("omnirelay.cli", "up") as process:
        read_until(process, "ready: tcp://")
        if process.stdout is not None:
            process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
@pytest.mark.parametrize("word", ["says hello", "listening on", "is ready after"])
def test_up_ends_whenever_it_is_told_to(place: Path, word: str, number: signal.Signals) -> None:
    with start("omnirelay.cli", "up") as process:
        read_until(process, word)
        children = children_of(process)
        assert end(process, number).endswith("stopped\n")
        assert all(map(gone, children))


def is_maker(command: list[bytes]) -> bool:
    return b"checkpoint" in command and b"-I" not in command


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_up_leaves_nothing_of_a_checkpoint_that_it_was_not_to_finish(
    place: Path, monkeypatch: Patch, number: signal.Signals, status: int
) -> None:
    monkeypatch.delenv("OMNI_MODEL")
    with start("omnirelay.cli", "up") as process:
        read_until(process, f"making the {DEFAULT_CHECKPOINT.name} checkpoint")
        wait_until(lambda: children_of(process), "its maker")
        (maker,) = children_of(process)
        # A guard that is stopped before it has become the maker does not see that the launcher ends; and a
        # launcher waits for a child that is stopped before it has become anything.
        wait_until(lambda: is_maker(Path(f"/proc/{maker}/cmdline").read_bytes().split(b"\0")), "it")
        # Or it may be done before the signal comes.
        os.kill(maker, signal.SIGSTOP)
        end(process, number, status)
        wait_until(lambda: gone(maker), "its end")
    assert not [path for path in (place / DEFAULT_CHECKPOINT).parent.glob("*") if path.is_dir()]


def test_children_die_with_the_launcher(place: Path) -> None:
    with start("omnirelay.cli", "up") as process:
        read_until(process, "ready: tcp://")
        children = children_of(process)
        assert len(children) == 4
        process.kill()
        process.wait(timeout=60)
        wait_until(lambda: all(map(gone, children)), "their end")
        if process.stdout is not None:
            process.stdout.close()


def test_stage_that_cannot_start_is_named_in_a_line_of_json_where_the_log_is(
    place: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("FAKE_TALKER", "fail")
    monkeypatch.setenv("OMNIRELAY_LOG_FORMAT", "json")
    told = [json.loads(line) for line in output_of("omnirelay.cli", "up").splitlines()]
    assert (told[-1]["process"], told[-1]["level"]) == ("launcher", "error")
    reason = "stage_start_failed: the talker ended with exit status 3 before all were ready"
    assert told[-1]["message"].startswith(reason)
    assert "\n  [talker] the talker has no reason to live" in told[-1]["message"]


@pytest.mark.parametrize("name", ["model.safetensors", "spk_dict.pt"])
def test_up_tells_of_a_damaged_checkpoint_first(
    place: Path, checkpoint_dir: Path, monkeypatch: Patch, capsys: Output, name: str
) -> None:
    model = shutil.copytree(checkpoint_dir, place / "model")
    monkeypatch.setenv("OMNI_MODEL", str(model))
    os.truncate(model / name, (model / name).stat().st_size // 2)
    assert main(["up"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"omnirelay: checkpoint_invalid: {model}: {name} is cut short")


def test_a_configuration_that_children_could_not_read_is_refused_by_up(place: Path, capsys: Output) -> None:
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as file:
        file.write("log_level: debug")
        file.close()
        assert main(["up", "--config", f"/dev/fd/{reading}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"config_invalid: the configuration /dev/fd/{reading} is no regular file" in line


def test_up_tells_every_port_in_use_and_an_offset_moves_a_second_stack(
    place: Path, checkpoint_dir: Path, monkeypatch: Patch
) -> None:
    listen = os.environ["OMNIRELAY_GATEWAY__LISTEN"]
    moved = f"tcp://127.0.0.1:{int(listen.rpartition(':')[2]) + OFFSET}"
    (http,) = free_ports(1)
    with start("gateway") as other:
        read_until(other, "listening on")
        (line,) = output_of("omnirelay.cli", "up").splitlines()
        assert line.startswith(f"omnirelay: address_in_use: {listen} (gateway.listen) is in use")
        assert line.count(f", pid {other.pid}") == len(GATEWAY_KEYS)
        assert "--port-offset 1000" in line
        monkeypatch.delenv("OMNI_MODEL")
        # The file is read by all processes, too.
        (place / "config.yaml").write_text("log_level: debug\n")
        moves = ["--config", "config.yaml", "--port-offset", str(OFFSET)]
        options = [*moves, "--port", str(http), "--served-model-name", "one", "tts-1"]
        with start("omnirelay.cli", "serve", str(checkpoint_dir), *options) as process:
            ready = read_until(process, "ready: ")[-1]
            assert f"ready: {moved}, http://127.0.0.1:{http} (model {checkpoint_dir})" in ready
            with urlopen(f"http://127.0.0.1:{http}/v1/models/tts-1", timeout=60) as answer:
                assert json.load(answer)["id"] == checkpoint_dir.name
            with Client(moved) as client:
                assert client.status().ready
            before = children_of(process)
            assert "was replaced" in output_of("omnirelay.cli", "restart", "talker", *moves, status=0)
            children = children_of(process)
            assert len(children & before) == len(before) - 1 == len(children) - 1
            assert end(process).endswith("stopped\n")
            assert all(map(gone, children))
        end(other)


def test_the_host_of_serve_may_be_of_ipv6(tmp_path: Path) -> None:
    arguments = build_parser().parse_args(["serve", "MODEL", "--host", "::1", "--text-only"])
    assert overrides(arguments) == {
        "OMNI_MODEL": "MODEL",
        "OMNIRELAY_TEXT_ONLY": "true",
        "OMNIRELAY_GATEWAY__HTTP": "tcp://[::1]:8000",
    }
    path = tmp_path / "config.yaml"
    path.write_text(
        "gateway:\n"
        "  {http: null, events: 'ipc:///tmp/events', http_gateways: ['http://[::1]:8010', 'https://proxied'],\n"
        "   others: [{events: tcp://b:6, control: tcp://b:7}]}\n"
        "stages: {talker: {advertise: tcp://a:5}}\n"
        "security: {internal_network: true}"
    )
    arguments = build_parser().parse_args(["up", "--config", str(path), "--port-offset", "7"])
    changed = overrides(arguments)
    assert "OMNIRELAY_GATEWAY__HTTP" not in changed
    assert changed["OMNIRELAY_GATEWAY__EVENTS"] == "ipc:///tmp/events.7"
    assert changed["OMNIRELAY_STAGES__TALKER__ADVERTISE"] == "tcp://a:12"
    gateway = load_config(path, changed).gateway
    assert [(each.events, each.control) for each in gateway.others] == [("tcp://b:13", "tcp://b:14")]
    assert gateway.http_gateways == ["http://[::1]:8017", "https://proxied"]


async def ready_pids(stack: Stack, wanted: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """The processes of the stages that are ready, once they are as wanted."""
    async with asyncio.timeout(60):
        while True:
            report = (await stack._ask())["gateway"]
            ready = [] if report is None else [each for each in report.stages if each.state == "ready"]
            pids: dict[str, int] = {each.name: each.pid for each in ready if each.pid is not None}
            if wanted(pids):
                return pids
            await asyncio.sleep(0.05)


async def test_stages_that_die_or_are_told_to_end_are_started_again(
    place: Path, monkeypatch: Patch, said: list[str]
) -> None:
    """Whatever ends them, once they serve: it may be a request, which must not stop everything."""
    monkeypatch.setattr(launcher, "MOST_RESTARTS", 1)

    async with watched() as (stack, watch):
        first = await ready_pids(stack, lambda pids: len(pids) == len(STAGES))
        last, seen = first["talker"], {first["talker"]}
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1, signal.SIGTERM):
            os.kill(last, number)
            pids = await ready_pids(stack, lambda pids: pids.get("talker", 0) not in {0, *seen})
            last = pids["talker"]
            seen.add(last)
        assert (pids["thinker"], watch.done()) == (first["thinker"], False)
    assert "the talker was killed by SIGKILL: it is started again" in said
    assert "the talker ended with exit status 0: it is started again" in said


async def test_a_process_is_started_again_when_the_machine_has_room_for_it(
    place: Path, monkeypatch: Patch, said: list[str]
) -> None:
    monkeypatch.setattr(launcher, "AGAIN_S", 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with watched() as (stack, watch):
        before = await ready_pids(stack, lambda pids: len(pids) == len(STAGES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            os.kill(before["talker"], signal.SIGKILL)
            while not any("the talker cannot be started: [Errno 24]" in line for line in said):
                assert not watch.done()
                await asyncio.sleep(0.02)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await ready_pids(stack, lambda pids: pids.get("talker", 0) not in {0, before["talker"]})


async def test_a_stack_is_ready_when_all_are_at_the_same_time(
    place: Path, monkeypatch: Patch, said: list[str]
) -> None:
    ask, turns = Stack._ask_gateway, list(STAGES)

    async def one_after_the_other(stack: Stack, gateway: child.Child) -> StatusReport | None:
        report = await ask(stack, gateway)
        if report is None or any(stage.state != "ready" for stage in report.stages) or not turns:
            return report
        name = turns.pop(0)
        only = [
            msgspec.structs.replace(each, state="ready" if each.name == name else "starting")
            for each in report.stages
        ]
        return msgspec.structs.replace(report, stages=only)

    monkeypatch.setattr(Stack, "_ask_gateway", one_after_the_other)
    async with running(Stack(load_config(), None, lambda *_: None)) as report:
        assert not turns
        assert [stage.state for stage in report.stages] == ["ready"] * 3
    assert sorted(line.split()[1] for line in said if "is ready" in line) == sorted(["gateway", *STAGES])


async def test_kills_of_a_gateway_that_serves_do_not_end_the_stack(place: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(launcher, "MOST_RESTARTS", 0)
    monkeypatch.setenv("OMNIRELAY_GATEWAY__REPLICAS", "2")
    async with watched() as (stack, watch):
        first, second = stack._gateways()
        seen = {second.pid}
        for _ in range(2):
            os.kill(second.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while second.pid in seen or not second.served:
                    assert not watch.done()
                    await asyncio.sleep(0.05)
                    second = stack._gateways()[1]
            seen.add(second.pid)
        assert first.alive


async def test_stage_that_dies_again_and_again_before_it_serves_or_will_not_stop(
    place: Path, monkeypatch: Patch, said: list[str]
) -> None:
    monkeypatch.setattr(launcher, "STOP_S", 0.5)
    monkeypatch.setattr(launcher, "MOST_RESTARTS", 0)
    monkeypatch.setenv("FAKE_TOKEN2WAV", "stubborn")
    # One that gateways of other machines use is given time for their requests.
    events, control = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    monkeypatch.setenv("OMNIRELAY_GATEWAY__OTHERS", json.dumps([{"events": events, "control": control}]))
    for name in ("GATEWAY", *(f"STAGES__{stage.upper()}" for stage in STAGES)):
        monkeypatch.setenv(f"OMNIRELAY_{name}__DRAIN_S", "1.5")

    stack = Stack(load_config(), None, lambda *_: None)
    pids: list[int] = []

    async def lose_the_thinker() -> None:
        async with running(stack) as report:
            pids.extend(stage.pid or 0 for stage in report.stages)
            monkeypatch.setenv("FAKE_THINKER", "fail")
            os.kill(pids[0], signal.SIGKILL)
            await stack.watch()

    losing = asyncio.create_task(lose_the_thinker())
    while not any(not gateway.alive for gateway in stack._gateways()):
        await asyncio.sleep(0.02)
    # As by Ctrl-C while the stages are being stopped.
    losing.cancel()
    began = time.monotonic()
    with pytest.raises(StageStartError, match="the thinker ended with exit status 3 while the stack"):
        await losing
    assert any("the token2wav did not stop within" in line for line in said)
    assert time.monotonic() - began > 1.5
    assert all(gone(pid) for pid in pids)


def test_demo(place: Path, capsys: Output) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "audio:  question.ogg, Ogg Opus, 2.2 s",
        "image:  picture.png, PNG, 336 x 252 pixels",
        ", 3 of them cached",
        "the thinker is ready",
        "answer:",
        "time to first text",
        "wall time",
        "peak memory",
        "stopped",
    ):
        assert words in shown
    with wave.open(str(place / "out" / "reply.wav")) as file:
        assert file.getnframes() == 24_000


async def test_an_early_sighup_ends_no_process_and_its_end_may_be_unknown_to_who_kills_it() -> None:
    started = await child.Child.start("short", [sys.executable, "-c", ""], lambda *_: None)
    started.send_signal(signal.SIGHUP)
    late = time.monotonic() + 60
    # This loop does not hear of the end meanwhile; some Pythons leave a zombie to it.
    while Path(f"/proc/{started.pid}").exists() and time.monotonic() < late:
        late = min(late, time.monotonic() + 1) if gone(started.pid) else late
        time.sleep(0.01)
    started.kill()
    assert await started.wait(60)
    assert started.ending == "ended with exit status 0"


async def test_long_and_broken_lines_are_shown(monkeypatch: Patch) -> None:
    monkeypatch.setattr(child, "MAX_LINE_BYTES", 100)
    shown: list[str] = []
    code = "import sys; sys.stdout.buffer.write(b'x' * 250 + b'\\n\\xff y\\n\\nlast')"

    started = await child.Child.start("odd", [sys.executable, "-c", code], lambda _, line: shown.append(line))
    assert await started.wait(60)
    assert started.ending == "ended with exit status 0"
    assert "".join(shown) == "x" * 250 + "\ufffd ylast"
    assert shown[-2:] == ["\ufffd y", "last"]
