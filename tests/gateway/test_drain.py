"""A gateway that is told to stop ends what was begun; one that is sent SIGHUP ends nothing."""

import asyncio
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from omnirelay import AsyncClient, errors
from ops import child
from shared.messages import STAGES
from tests.gateway.bench import Bench, Configure, bench, fails
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HI, MODEL, HttpBench, events_in
from tests.gateway.scripted import Script, whole
from tests.gateway.test_processes import children_of, gone
from tests.support.processes import wait_until

LONG_S = 60.0
"""A grace period whose end no test sees."""


async def drains(b: Bench, grace_s: float = LONG_S) -> tuple[asyncio.Task[None], asyncio.Event]:
    """Tell the gateway to stop, and wait until it is going to."""
    hurry = asyncio.Event()
    drain = asyncio.create_task(b.process.drain(grace_s, hurry))
    await until(lambda: b.process.gateway.stopping)
    return drain, hurry


async def test_what_is_there_ends_and_nothing_new_begins(configure: Configure) -> None:
    async with bench(configure(max_active=1)) as b, b.client() as client:
        script = Script(b)
        served = client.chat("Hi", seed=0)
        first = await b.stages.request(0)
        await script.play(first, 0.5, 0.5, 0.4)
        queued = client.chat("Hi", seed=1)
        await until(lambda: b.counts["queued"] == 1)
        drain, _ = await drains(b)
        refused = await fails(client.chat("Hi"), errors.StoppingError, "is stopping")
        assert 1000 <= refused.retry_after_ms <= 1000 * LONG_S
        with pytest.raises(errors.GatewayUnreachableError):
            async with AsyncClient(b.listen) as other:
                await other.status()
        await script.play(first)
        await whole(served, script)
        assert not drain.done()
        await script.play(await b.stages.request(1))
        await whole(queued, script)
        await drain
        assert b.counts["completed"] == 2


@pytest.mark.parametrize("hurried", [False, True])
async def test_what_does_not_end_in_time_is_cancelled(tcp: Bench, client: AsyncClient, hurried: bool) -> None:
    answer = client.chat("Hi")
    await tcp.stages.request(0)
    began = time.monotonic()
    drain, hurry = await drains(tcp, LONG_S if hurried else 0.3)
    if hurried:
        hurry.set()
    await drain
    assert hurried or time.monotonic() - began >= 0.3
    stop = asyncio.create_task(tcp.process.stop())
    await fails(answer, errors.CancelledRequestError, "shutting down")
    await stop
    await tcp.stages.aborted(answer.request_id or "")
    with pytest.raises(errors.GatewayUnreachableError):
        await tcp.client().connect()


async def test_an_answer_that_is_not_read_yet_is_waited_for(web: HttpBench) -> None:
    script = Script(web)
    asked = asyncio.create_task(
        web.ai.chat.completions.create(model=MODEL, messages=HI, stream=False, modalities=["text"])
    )
    request = await web.stages.request(0)
    # A connection of its own, opened before.
    assert (await web.http.get("/readyz")).status_code == 200
    drain, _ = await drains(web)
    ready = await web.http.get("/readyz")
    assert ready.status_code == 503
    assert "draining" in ready.json()["reasons"][0]
    told = await web.post()
    assert (told.status_code, told.json()["error"]["code"]) == (503, "stopping")
    assert 1 <= int(told.headers["Retry-After"]) <= LONG_S
    assert not drain.done()
    await script.play(request)
    assert (await asked).choices[0].message.content
    await drain


async def test_a_speech_does_not_wait_for_a_place_at_a_gateway_that_stops(web: HttpBench) -> None:
    body = {"model": MODEL, "input": "A sentence of a text. " * 9 + "The end.", "stream_format": "sse"}
    asked = asyncio.create_task(web.http.post("/v1/audio/speech", json=body))
    request = await web.stages.request(0)
    drain, _ = await drains(web)
    await web.stages.answer(request, [])
    async with asyncio.timeout(LONG_S / 2):
        [*_, error] = events_in((await asked).text)
    assert error["error"]["code"] == "stopping"
    await drain


async def test_stages_that_stop_too_serve_until_the_gateway_has_ended(configure: Configure) -> None:
    async with bench(configure(max_active=1)) as b, b.client() as client:
        script = Script(b)
        answers = [client.chat("Hi", seed=each) for each in range(3)]
        first = await b.stages.request(0)
        await until(lambda: b.counts["queued"] == 2)
        for stage in STAGES:
            b.stages.replica(stage).draining = True
        drain, _ = await drains(b)
        await until(lambda: all(each.beat.draining for each in b.registry.replicas()))
        await script.play(first)
        for index in (1, 2):
            await script.play(await b.stages.request(index))
        for answer in answers:
            await whole(answer, script)
        await drain
        assert not any(b.stages.replica(stage).released for stage in STAGES)
        assert all(b.stages.replica(stage).gateway == b.process.gateway.name for stage in STAGES)
        await b.process.stop()
        await until(lambda: all(b.stages.replica(stage).gateway is None for stage in STAGES))


def test_children_of_the_launcher_outlive_it_at_any_time() -> None:
    """Also before they have a handler of their own."""
    code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
    command = [sys.executable, "-I", str(child.GUARD), str(os.getpid()), sys.executable, "-c", code]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


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
        children = children_of(process)
        assert len(children) == 4
        os.close(theirs)
        os.close(ours)
        assert process.wait(timeout=60) == 0
        wait_until(lambda: all(map(gone, children)), "their end")
    finally:
        with suppress(OSError):
            os.close(ours)
        process.kill()
        process.wait()
