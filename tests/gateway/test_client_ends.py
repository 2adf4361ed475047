"""Clients and answers that are closed, left or lost: requests are cancelled, and nobody waits for ever."""

import asyncio
import gc
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omnirelay import AsyncAnswer, AsyncClient, AudioEvent, Client, TextEvent
from omnirelay.errors import CancelledRequestError, GatewayUnreachableError
from omnirelay.protocol import PROTOCOL_VERSION, Welcome, pack, read_frame
from tests.gateway.bench import Bench, Configure, Patch, bench, fails
from tests.gateway.fake_stages import until
from tests.gateway.test_tls import Certified, tls_address


async def test_leaving_while_audio_streams_over_tls_is_no_error(configure: Configure, tmp_path: Path) -> None:
    certified = Certified(tmp_path)

    async with bench(configure({"tls": certified.config})) as b:
        async with AsyncClient(tls_address(b), ca=certified.ca) as client:
            answer = client.chat("Hi")
            request = await b.stages.request(0)
            # More than sockets hold, and less than a client may leave unread.
            for seq in range(40):
                await b.stages.audio(request.request_id, seq, bytes(2**20))
            async for event in answer:
                if isinstance(event, AudioEvent):
                    break
        await b.stages.aborted(request.request_id)


@pytest.mark.filterwarnings("error")
async def test_a_plain_client_that_was_closed_says_so(tcp: Bench) -> None:
    def use(listen: str) -> None:
        with Client(listen) as client:
            answer = client.chat("Hi")
        client.close()
        for work in (client.status, lambda: client.chat("Hi"), lambda: next(answer), answer.result):
            with pytest.raises(GatewayUnreachableError, match="the client was closed"):
                work()
        # Nothing is left to be cancelled.
        answer.cancel()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with answer:
                pass

    await asyncio.to_thread(use, tcp.listen)


async def test_threads_that_wait_hear_that_their_client_is_closed(tcp: Bench) -> None:
    def use(listen: str) -> None:
        client = Client(listen)
        answers = [client.chat("Hi") for _ in range(4)]
        heard: list[BaseException] = []

        def wait(index: int) -> None:
            try:
                answers[index].result()
            except GatewayUnreachableError as error:
                heard.append(error)

        threads = [threading.Thread(target=wait, args=(index,), daemon=True) for index in range(4)]
        for thread in threads:
            thread.start()
        client.close()
        for thread in threads:
            thread.join(60)
        assert len(heard) == 4

    await asyncio.to_thread(use, tcp.listen)


async def test_a_plain_client_that_is_lost_leaves_nothing(tcp: Bench) -> None:
    def lose(listen: str) -> threading.Thread:
        client = Client(listen)
        thread, answer = client._thread, client.chat("Hi")
        next(answer)
        del client, answer
        gc.collect()
        return thread

    losing = asyncio.create_task(asyncio.to_thread(lose, tcp.listen))
    request = await tcp.stages.request(0)
    await tcp.stages.text(request.request_id, 0, tcp.encode("Hello"))
    thread = await losing
    await tcp.stages.aborted(request.request_id)
    await until(lambda: not thread.is_alive(), "the end of the client's thread")
    await until(lambda: not tcp.process.access.tcp_places.taken, "no connection")


async def test_what_is_collected_on_the_clients_thread_does_not_block_it(tcp: Bench) -> None:
    def events(client: Client) -> Generator[Any, None, None]:
        with client.chat("Hi") as answer:
            yield from answer

    def use(listen: str) -> None:
        with Client(listen) as client:
            cycle: list[Any] = [events(client)]
            next(cycle[0])
            cycle.append(cycle)
            collected = threading.Event()
            del cycle

            def collect() -> None:
                gc.collect()
                collected.set()

            client._loop.call_soon_threadsafe(collect)
            assert collected.wait(60)
            assert client.status().ready

    gc.disable()
    try:
        using = asyncio.create_task(asyncio.to_thread(use, tcp.listen))
        request = await tcp.stages.request(0)
        await tcp.stages.text(request.request_id, 0, tcp.encode("Hello"))
        await using
        await tcp.stages.aborted(request.request_id)
    finally:
        gc.enable()


FORKS = """
import os, sys
from omnirelay import Client, errors
with Client(sys.argv[1]) as client:
    child = os.fork()
    if not child:
        try:
            client.status()
        except errors.GatewayUnreachableError as error:
            print(error, flush=True)
        client.close()
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.status().ready)
"""


async def test_a_forked_process_needs_a_client_of_its_own(tcp: Bench) -> None:
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", FORKS, tcp.listen, stdout=pipe)
    said, _ = await program.communicate()
    assert said.decode().splitlines() == ["a process that was forked needs a client of its own", "7 True"]


async def test_a_client_of_another_event_loop_is_not_waited_for(tcp: Bench) -> None:
    def use(client: AsyncClient, answer: AsyncAnswer) -> None:
        async def ask() -> None:
            for work in (answer.result, client.status):
                with pytest.raises(RuntimeError, match="another event loop"):
                    await work()
            with pytest.raises(RuntimeError, match="another event loop"):
                client.chat("Hi")

        asyncio.run(ask())
        with pytest.raises(RuntimeError):
            client.chat("Hi")

    async with AsyncClient(tcp.listen) as client:
        answer = client.chat("Hi")
        await asyncio.to_thread(use, client, answer)
        await tcp.stages.answer(await tcp.stages.request(0), tcp.encode("Hello"))
        client.chat("Hi again")
        assert len(tcp.stages.requests) == 1


@asynccontextmanager
async def silent_gateway() -> AsyncIterator[str]:
    """A gateway that says hello, and then reads nothing and says nothing."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await read_frame(reader, 2**20)
        writer.write(pack(Welcome(PROTOCOL_VERSION, resumes=True)))
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's has it

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()


@pytest.mark.parametrize("cancelled", [False, True], ids=["once", "after a cancelled attempt"])
async def test_a_client_of_a_gateway_that_reads_nothing_can_be_closed(cancelled: bool) -> None:
    async with silent_gateway() as address, AsyncClient(address, reconnect_s=0) as client:
        answer = client.chat("Hi", images=bytes(64 * 2**20))
        connection: Any = client._connection
        await until(lambda: connection._writer.transport.get_write_buffer_size() > 0, "a full socket")
        if cancelled:
            closing = asyncio.create_task(connection.close())
            await until(connection._writer.is_closing, "a connection that is being closed")
            closing.cancel()
        await client.close()
        await fails(answer, GatewayUnreachableError)


async def test_a_status_that_never_comes_is_not_waited_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr("omnirelay.client.transport.connection.TICK_S", 0.02)

    async with silent_gateway() as address, AsyncClient(address, reconnect_s=0) as client:
        with pytest.raises(GatewayUnreachableError, match="has not answered"):
            await client.status()


async def begin(b: Bench, number: int = 0) -> str:
    """Let the thinker have the request, and answer some of it."""
    request = await b.stages.request(number)
    await b.stages.audio(request.request_id, 0, bytes(960))
    return request.request_id


async def assert_cancelled(b: Bench, request_id: str) -> None:
    await b.stages.aborted(request_id)
    await until(lambda: b.counts["cancelled"] == 1)
    assert not b.counts["completed"]


async def limited(work: Awaitable[object]) -> None:
    async with asyncio.timeout(1):
        await work


async def read(answer: AsyncAnswer, forever: bool = False) -> None:
    async for _ in answer:
        if forever:
            await asyncio.Event().wait()


async def timeout_of_a_result(b: Bench, client: AsyncClient) -> None:
    answer = client.chat("Hi")
    await b.stages.request(0)
    with pytest.raises(TimeoutError):
        await limited(answer.result())
    await fails(answer, CancelledRequestError)


async def timeout_of_a_loop(b: Bench, client: AsyncClient) -> None:
    reading = asyncio.create_task(read(client.chat("Hi")))
    await b.stages.request(0)
    with pytest.raises(TimeoutError):
        await limited(reading)


async def timeout_within_a_loop(b: Bench, client: AsyncClient) -> None:
    answer = client.chat("Hi")
    await begin(b)
    with pytest.raises(TimeoutError):
        await limited(read(answer, forever=True))


async def cancelled_task(b: Bench, client: AsyncClient) -> None:
    answer = client.chat("Hi")
    task = asyncio.create_task(answer.result())
    await b.stages.request(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def left_loop(b: Bench, client: AsyncClient) -> None:
    answer = client.chat("Hi")
    await begin(b)
    async for event in answer:
        if isinstance(event, AudioEvent):
            break
    await fails(answer, CancelledRequestError)


async def lost(b: Bench, client: AsyncClient) -> None:
    answer: AsyncAnswer | None = client.chat("Hi")
    await b.stages.request(0)
    del answer


@pytest.mark.parametrize(
    "leave", [timeout_of_a_result, timeout_of_a_loop, timeout_within_a_loop, cancelled_task, left_loop, lost]
)
async def test_answers_that_are_left(
    tcp: Bench, leave: Callable[[Bench, AsyncClient], Awaitable[None]]
) -> None:
    async with AsyncClient(tcp.listen) as client:
        await leave(tcp, client)
        await assert_cancelled(tcp, (await tcp.stages.request(0)).request_id)


def left_plain_loop(client: Client) -> None:
    answer = client.chat("Hi")
    for _ in answer:
        break
    with pytest.raises(CancelledRequestError):
        answer.result()


def lost_plain_answer(client: Client) -> None:
    next(client.chat("Hi"))


@pytest.mark.parametrize("leave", [left_plain_loop, lost_plain_answer])
async def test_so_is_one_of_plain_code(tcp: Bench, leave: Callable[[Client], None]) -> None:
    client = await asyncio.to_thread(Client, tcp.listen)
    leaving = asyncio.create_task(asyncio.to_thread(leave, client))
    await assert_cancelled(tcp, await begin(tcp))
    await leaving
    await asyncio.to_thread(client.close)


async def test_the_result_is_always_that_of_the_whole_answer(tcp: Bench) -> None:
    def use(listen: str) -> None:
        with Client(listen) as client:
            answer = client.chat("Hi")
            assert isinstance(next(answer), TextEvent)
            first = answer.result()
            assert first.text == "Hello"
            assert len(first.waveform) == 360 * 4
            assert answer.result() == first
            assert repr(first) == "ChatResult(text='Hello', audio_seconds=0.01)"
            assert list(answer) == []

    tcp.stages.serve(tcp.encode("Hello"))
    await asyncio.to_thread(use, tcp.listen)
    assert (tcp.counts["completed"], tcp.counts["cancelled"]) == (1, 0)
