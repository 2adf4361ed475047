"""Answers that nobody waits for any more: their requests are cancelled at the gateway and at the stages."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from omnirelay import AsyncAnswer, AsyncClient, AudioEvent, Client, TextEvent
from omnirelay.errors import CancelledRequestError
from tests.gateway.bench import Bench, Configure, bench
from tests.gateway.fake_stages import until


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
    with pytest.raises(TimeoutError):
        await limited(answer.result())
    with pytest.raises(CancelledRequestError):
        await answer.result()


async def timeout_of_a_loop(b: Bench, client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        await limited(read(client.chat("Hi")))


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
    with pytest.raises(CancelledRequestError):
        await answer.result()


async def lost(b: Bench, client: AsyncClient) -> None:
    answer: AsyncAnswer | None = client.chat("Hi")
    await b.stages.request(0)
    del answer


@pytest.mark.parametrize(
    "leave", [timeout_of_a_result, timeout_of_a_loop, timeout_within_a_loop, cancelled_task, left_loop, lost]
)
async def test_a_request_whose_answer_is_left_is_cancelled(
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


async def test_the_result_is_that_of_the_whole_answer_however_often_it_is_asked_for(
    configure: Configure,
) -> None:
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

    async with bench(configure()) as b:
        b.stages.serve(b.encode("Hello"))
        await asyncio.to_thread(use, b.listen)
        assert (b.counts["completed"], b.counts["cancelled"]) == (1, 0)
