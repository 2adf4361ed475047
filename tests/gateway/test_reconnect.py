"""The client when its gateway is lost: real sockets, gateways that say what a test wants."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from omnirelay import AsyncClient, AudioEvent, GenerateRequest, TextEvent
from omnirelay.client.aio import RECONNECT_S
from omnirelay.client.answer import AsyncAnswer
from omnirelay.client.transport import connection as transport
from omnirelay.errors import (
    BusyError,
    CancelledRequestError,
    ConfigError,
    DeadlineError,
    GatewayUnreachableError,
    MessageError,
    StageFailedError,
    UnauthenticatedError,
)
from omnirelay.events import AcceptedEvent, CodecEvent, DoneEvent, ErrorEvent, Event
from omnirelay.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    ClientMessage,
    Hello,
    PartialAnswer,
    Ping,
    Pong,
    Refusal,
    Reply,
    Submit,
    Welcome,
    pack,
    read_frame,
)
from tests.gateway.bench import Patch, fails
from tests.support.ports import free_ports
from tests.support.stack import COMMAND

CHUNK = b"\0\0\0\x3f" * 480
DONE = DoneEvent(
    request_id="last",
    text="ab",
    prompt_token_ids=[1],
    text_token_ids=[11, 12],
    codec_token_ids=[21, 22],
    audio_seconds=0.04,
    finish_reason="stop",
    codec_finish_reason="stop",
    seed=5,
    speaker="Chelsie",
    state_seconds={},
)
WHOLE: list[Event] = [
    AcceptedEvent(request_id="r1", seed=5),
    TextEvent(token_ids=[11], text="a"),
    CodecEvent(token_ids=[21]),
    AudioEvent(seq=0, pcm=CHUNK),
    TextEvent(token_ids=[12], text="b", finish_reason="stop"),
    CodecEvent(token_ids=[22], finish_reason="stop"),
    AudioEvent(seq=1, pcm=CHUNK),
    DONE,
]
REFUSED = ErrorEvent(code="busy", message="no place", retry_after_ms=10)


class Session:
    """One connection, as the gateway sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, resumes: bool) -> None:
        self.reader = reader
        self.writer = writer
        self.resumes = resumes

    async def hear(self) -> ClientMessage:
        body = await read_frame(self.reader, 2**30)
        message: ClientMessage = msgspec.msgpack.decode(body, type=ClientMessage)
        return message

    async def asked(self) -> tuple[int, GenerateRequest]:
        """The next request."""
        message = await self.hear()
        assert isinstance(message, Submit)
        return message.id, msgspec.msgpack.decode(message.request, type=GenerateRequest)

    async def say(self, client_id: int, *told: Event) -> None:
        for event in told:
            self.writer.write(pack(Reply(client_id, event)))
        await self.writer.drain()

    async def greet(self) -> None:
        assert isinstance(await self.hear(), Hello)
        self.writer.write(pack(Welcome(PROTOCOL_VERSION, resumes=self.resumes)))


Play = Callable[[Session], Awaitable[None]]


@asynccontextmanager
async def gateway(*plays: Play, port: int = 0, resumes: bool = True) -> AsyncIterator[str]:
    """Play one part for each connection, which is closed behind it; fails if a part fails or is missing."""
    left = list(plays)
    failures: list[BaseException] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            session = Session(reader, writer, resumes)
            await session.greet()
            await left.pop(0)(session)
        except asyncio.CancelledError:
            raise
        except (AssertionError, IndexError, OSError, asyncio.IncompleteReadError) as error:
            failures.append(error)
        finally:
            writer.transport.abort()

    chosen = port or free_ports(1)[0]
    async with await asyncio.start_server(serve, "127.0.0.1", chosen):
        yield f"tcp://127.0.0.1:{chosen}"
    assert failures == []
    assert left == []


def answers(*told: Event, then: Play | None = None) -> Play:
    """Answer one request with these events."""

    async def play(session: Session) -> None:
        client_id, _ = await session.asked()
        await session.say(client_id, *told)
        if then is not None:
            await then(session)

    return play


async def stay(session: Session) -> None:
    """Read, and say nothing more."""
    while await session.reader.read(2**16):
        continue


async def gathered(answer: AsyncAnswer) -> list[Any]:
    return [event async for event in answer]


def expect(count: int, check: Callable[[GenerateRequest], None] = lambda _: None) -> Play:
    """Take a request that brings what so many events told, and send the rest of the answer."""

    async def play(session: Session) -> None:
        client_id, request = await session.asked()
        assert request.resume == held(count)
        assert request.resumable
        assert request.seed == (5 if count else None)
        check(request)
        await session.say(client_id, AcceptedEvent(request_id="r2", seed=5), *WHOLE[max(1, count) :])
        await stay(session)

    return play


@asynccontextmanager
async def meeting(*plays: Play, **options: Any) -> AsyncIterator[AsyncClient]:
    """A client of one gateway, which plays these parts."""
    async with gateway(*plays) as address, AsyncClient(address, **options) as client:
        yield client


@asynccontextmanager
async def lost(
    count: int, port: int = 0, others: Sequence[str] = (), **options: Any
) -> AsyncIterator[AsyncAnswer]:
    """An answer whose gateway was lost after so many events, of which its first text was taken."""
    async with AsyncExitStack() as stack:
        async with gateway(answers(*WHOLE[:count]), port=port) as address:
            client = await stack.enter_async_context(AsyncClient([address, *others], **options))
            answer = client.chat("Hi")
            assert isinstance(await anext(answer), TextEvent)
        yield answer


def held(count: int) -> PartialAnswer | None:
    """What a client has after so many of the events."""
    if count == 0:
        return None
    texts = [event for event in WHOLE[:count] if isinstance(event, TextEvent)]
    codes = [event for event in WHOLE[:count] if isinstance(event, CodecEvent)]
    return PartialAnswer(
        request_id="r1",
        text_token_ids=[11, 12][: len(texts)],
        text_finish_reason="stop" if len(texts) == 2 else None,
        codec_token_ids=[21, 22][: len(codes)],
        codec_finish_reason="stop" if len(codes) == 2 else None,
        chunk_samples=[480] * sum(isinstance(event, AudioEvent) for event in WHOLE[:count]),
    )


def check_whole(events: list[Any]) -> None:
    """Nothing is missing, and nothing came twice."""
    assert "".join(event.text for event in events if isinstance(event, TextEvent)) == "ab"
    assert [i for event in events if isinstance(event, TextEvent) for i in event.token_ids] == [11, 12]
    assert [event.seq for event in events if isinstance(event, AudioEvent)] == [0, 1]
    assert events[-1].text == "ab"


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("count", range(len(WHOLE)))
async def test_after_any_event_the_answer_goes_on(count: int, elsewhere: bool) -> None:
    """At the same gateway, or at the next of the list."""

    first, second = answers(*WHOLE[:count]), expect(count)
    gateways = [gateway(first), gateway(second)] if elsewhere else [gateway(first, second)]
    async with AsyncExitStack() as stack:
        parts = [await stack.enter_async_context(each) for each in gateways]
        async with AsyncClient(parts) as client:
            answer = client.chat("Hi")
            check_whole(await gathered(answer))
            assert answer.request_id == "r2"
            assert client.address == parts[-1]


async def test_all_open_answers_go_on_and_later_ones_are_asked_there() -> None:
    async def lose(session: Session) -> None:
        for _ in range(3):
            client_id, _ = await session.asked()
            await session.say(client_id, *WHOLE[:3])

    async def go_on(session: Session) -> None:
        for number in range(4):
            client_id, request = await session.asked()
            assert (request.resume == held(3)) == (number < 3)
            await session.say(client_id, *(WHOLE[3:] if number < 3 else WHOLE))
        await stay(session)

    async with meeting(lose, go_on) as client:
        three = [client.chat("Hi") for _ in range(3)]
        for events in await asyncio.gather(*map(gathered, three)):
            check_whole(events)
        check_whole(await gathered(client.chat("Hi")))


async def test_a_gateway_that_was_lost_while_nothing_was_open_is_found_again() -> None:
    (port,) = free_ports(1)
    async with AsyncExitStack() as stack:
        async with gateway(answers(*WHOLE), port=port) as address:
            client = await stack.enter_async_context(AsyncClient(address))
            check_whole(await gathered(client.chat("Hi")))
        async with gateway(expect(0), port=port):
            check_whole(await gathered(client.chat("Hi")))


async def test_a_restart_is_waited_for() -> None:
    (port,) = free_ports(1)
    async with lost(4, port) as answer, gateway(expect(4), port=port):
        check_whole([WHOLE[1], *await gathered(answer)])


async def test_a_silent_gateway_is_given_up(monkeypatch: Patch) -> None:
    """It is asked first, and one that answers is not given up."""
    monkeypatch.setattr(transport, "TICK_S", 0.02)

    async def pings(session: Session) -> None:
        for _ in range(3):
            assert isinstance(await session.hear(), Ping)
            session.writer.write(pack(Pong()))
        assert isinstance(await session.hear(), Ping)
        await stay(session)

    async with (
        gateway(answers(*WHOLE[:4], then=pings)) as silent,
        gateway(expect(4)) as other,
        AsyncClient([silent, other]) as client,
    ):
        check_whole(await gathered(client.chat("Hi")))
        assert client.address == other


async def test_a_refusal_is_tried_again_where_the_answer_goes_on() -> None:
    """A gateway that has just started lacks its stages for a while."""
    missing = ErrorEvent(code="stage_unavailable", message="no thinker")

    async def refuse(session: Session) -> None:
        for refused in (missing, REFUSED, missing):
            client_id, request = await session.asked()
            assert request.resume == held(4)
            await session.say(client_id, refused)
        await expect(4)(session)

    async with meeting(answers(*WHOLE[:4]), refuse) as client:
        check_whole(await gathered(client.chat("Hi")))


async def test_a_first_refusal_is_the_answer() -> None:
    async with meeting(answers(REFUSED, then=stay)) as client:
        await fails(client.chat("Hi"), BusyError, "no place")


@pytest.mark.parametrize("code", ["stopping", "cancelled"])
async def test_a_gateway_that_stops_is_left(code: str) -> None:
    """Its own requests may end there; those that it refuses or gives up go on elsewhere."""
    stopped = ErrorEvent(code=code, message="shutting down", retry_after_ms=60_000)

    async def stop(session: Session) -> None:
        first, _ = await session.asked()
        await session.say(first, *WHOLE[:3])
        second, _ = await session.asked()
        await session.say(second, WHOLE[0], stopped)
        await session.say(first, *WHOLE[3:])
        await stay(session)

    async with gateway(stop) as old, gateway(expect(1)) as new, AsyncClient([old, new]) as client:
        one, two = client.chat("Hi"), client.chat("Hi")
        check_whole(await gathered(one))
        check_whole(await gathered(two))
        assert one.request_id == "r1"
        assert client.address == new


async def test_an_error_of_the_request_itself_is_not_retried() -> None:
    failed = ErrorEvent(code="stage_failed", message="it failed")
    async with meeting(answers(*WHOLE[:3]), answers(failed, then=stay)) as client:
        await fails(client.chat("Hi"), StageFailedError)


async def test_what_is_hopeless_says_what_was_tried() -> None:
    port, gone = free_ports(2)
    other = f"tcp://127.0.0.1:{gone}"
    async with lost(4, port, others=[other], reconnect_s=0.5) as answer:
        hopeless = await fails(answer, GatewayUnreachableError, r"within 0\.5 s; tried \d+ times")
    assert f"tcp://127.0.0.1:{port}" in str(hopeless)
    assert other in str(hopeless)


async def test_a_gateway_that_never_takes_it_is_given_up() -> None:
    async def refuse(session: Session) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                client_id, _ = await session.asked()
                await session.say(client_id, REFUSED)

    async with meeting(answers(*WHOLE[:4]), refuse, reconnect_s=0.5) as client:
        await fails(client.chat("Hi"), GatewayUnreachableError, r"could not go on: tried .* no place")


async def test_a_key_that_is_refused_everywhere_is_told_at_once() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader, 2**20)
        writer.write(pack(Refusal("unauthenticated", "who are you")))
        writer.close()

    (port,) = free_ports(1)
    async with lost(4, port) as answer, await asyncio.start_server(refuse, "127.0.0.1", port):
        await fails(answer, UnauthenticatedError, "who are you")


async def test_a_cancel_between_two_gateways_ends_it() -> None:
    async with lost(2) as answer:
        while answer._open._connection is not None:
            await asyncio.sleep(0)
        answer.cancel()
        await fails(answer, CancelledRequestError)


async def test_a_cancelled_answer_does_not_go_on() -> None:
    """The gateway is lost before it has confirmed."""

    async def ends(session: Session) -> None:
        assert isinstance(await session.hear(), Cancel)

    async with meeting(answers(*WHOLE[:2], then=ends)) as client:
        answer = client.chat("Hi")
        assert isinstance(await anext(answer), TextEvent)
        answer.cancel()
        await fails(answer, CancelledRequestError)


async def test_closing_ends_what_waits_for_a_gateway() -> None:
    async with gateway(answers()) as address:
        client = AsyncClient(address)
        await client.connect()
        answer = client.chat("Hi")
    while answer._open._connection is not None:
        await asyncio.sleep(0)
    asked = asyncio.create_task(client.status())
    await asyncio.sleep(0)
    await client.close()
    await fails(answer, GatewayUnreachableError, "was closed")
    with pytest.raises(GatewayUnreachableError, match="was closed"):
        await asked


async def test_closing_ends_a_connection_that_is_being_made() -> None:
    async def is_asked_nothing(session: Session) -> None:
        assert await session.reader.read() == b""

    async with gateway(is_asked_nothing) as address:
        client = AsyncClient(address)
        connecting = asyncio.create_task(client.connect())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(GatewayUnreachableError, match="was closed"):
            await connecting
        with pytest.raises(GatewayUnreachableError, match="not connected"):
            client.chat("Hi")


async def test_a_deadline_counts_from_the_first_gateway() -> None:
    def shortened(request: GenerateRequest) -> None:
        assert request.deadline_s is not None
        assert 0 < request.deadline_s < 60

    async with meeting(answers(*WHOLE[:4]), expect(4, shortened)) as client:
        check_whole(await gathered(client.chat("Hi", deadline_s=60)))
    # The next one is not waited for any longer.
    async with gateway(answers()) as address:
        client = AsyncClient(address)
        await client.connect()
        answer = client.chat("Hi", deadline_s=0.5)
    async with asyncio.timeout(RECONNECT_S / 2):
        await fails(answer, DeadlineError, "interrupted")
    await client.close()


async def test_files_are_sent_again() -> None:
    sound = bytes(range(256)) * 2048

    async def upload(session: Session) -> GenerateRequest:
        body = b""
        while True:
            message = await session.hear()
            assert not isinstance(message, Hello)
            if isinstance(message, Submit):
                return msgspec.msgpack.decode(message.request, type=GenerateRequest)
            body += getattr(message, "data", b"")
            if getattr(message, "last", False):
                return msgspec.msgpack.decode(body, type=GenerateRequest)

    uploads: list[GenerateRequest] = []

    async def take(session: Session) -> None:
        uploads.append(await upload(session))
        await session.say(1, *(WHOLE[:4] if len(uploads) == 1 else WHOLE[4:]))

    async with meeting(take, take) as client:
        check_whole(await gathered(client.chat("Hi", audio=sound)))
    before, after = uploads
    assert before.messages == after.messages
    assert after.resume == held(4)


async def test_earlier_gateways_are_asked_for_nothing_new() -> None:
    async def old(session: Session) -> None:
        client_id, request = await session.asked()
        assert not request.resumable
        await session.say(client_id, AcceptedEvent(request_id="r1"), *WHOLE[1:2])

    async with (
        gateway(old, resumes=False) as first,
        gateway(stay) as second,
        AsyncClient([first, second]) as client,
    ):
        await fails(client.chat("Hi"), GatewayUnreachableError, "an earlier version")


async def test_what_has_not_begun_goes_to_an_earlier_gateway_too() -> None:
    async def old(session: Session) -> None:
        client_id, request = await session.asked()
        assert not request.resumable
        assert request.resume is None
        await session.say(client_id, AcceptedEvent(request_id="r2"), *WHOLE[1:2], *WHOLE[3:4], WHOLE[4])
        await session.say(client_id, *WHOLE[6:])
        await stay(session)

    async with (
        gateway(answers()) as first,
        gateway(old, resumes=False) as second,
        AsyncClient([first, second]) as client,
    ):
        check_whole(await gathered(client.chat("Hi")))


async def test_a_program_may_bring_what_it_has() -> None:
    """And goes on with all of it when the gateway is lost."""

    async def first(session: Session) -> None:
        client_id, request = await session.asked()
        assert request.resume == held(4)
        await session.say(client_id, AcceptedEvent(request_id="r1", seed=5), WHOLE[4])

    asked = GenerateRequest(prompt_token_ids=[1], seed=5, resume=held(4))
    async with meeting(first, expect(5)) as client:
        events = await gathered(client.chat(asked))
    assert [event.seq for event in events if isinstance(event, AudioEvent)] == [1]
    assert [i for event in events if isinstance(event, TextEvent) for i in event.token_ids] == [12]


async def test_without_reconnecting_answers_end_with_their_connection() -> None:
    async def plain(session: Session) -> None:
        client_id, request = await session.asked()
        assert not request.resumable
        await session.say(client_id, *WHOLE[:2])

    async with meeting(plain, reconnect_s=0) as client:
        await fails(client.chat("Hi"), GatewayUnreachableError, "was lost")
        with pytest.raises(GatewayUnreachableError, match="was lost"):
            client.chat("Hi")
        with pytest.raises(GatewayUnreachableError):
            await client.status()


@pytest.mark.parametrize("number", [0, 2])
async def test_a_chunk_that_is_not_the_next_is_refused(number: int) -> None:
    told = [*WHOLE[:4], AudioEvent(seq=number, pcm=CHUNK)]
    async with meeting(answers(*told, then=stay), expect(0)) as client:
        await fails(client.chat("Hi"), MessageError, f"audio event {number}, but 1 is the next")
        # Of the connection nothing more is believed; the next request has another.
        check_whole(await gathered(client.chat("Hi")))


async def test_nothing_to_speak_is_told_once() -> None:
    nothing = AudioEvent(seq=0, pcm=b"")
    async with meeting(answers(WHOLE[0], nothing), answers(WHOLE[0], nothing, DONE, then=stay)) as client:
        events = await gathered(client.chat("Hi"))
    assert [type(event).__name__ for event in events] == ["AudioEvent", "TimedDoneEvent"]


async def test_the_first_address_that_answers_is_used() -> None:
    closed = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    async with gateway(expect(0)) as address, AsyncClient([*closed, address]) as client:
        assert client.address == address
        check_whole(await gathered(client.chat("Hi")))
    nobody = AsyncClient(closed)
    with pytest.raises(GatewayUnreachableError) as unreachable:
        await nobody.connect()
    with pytest.raises(GatewayUnreachableError):
        nobody.chat("Hi")
    assert all(each in str(unreachable.value) for each in closed)
    with pytest.raises(ConfigError, match="needs the address"):
        AsyncClient([])


async def test_the_command_goes_on_at_the_next_gateway() -> None:
    async with gateway(answers(*WHOLE[:4])) as first, gateway(expect(4)) as second:
        process = await asyncio.create_subprocess_exec(
            *(COMMAND, "chat", "Hi", "--json", "--gateway", first, "--gateway", second),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0
    told = [json.loads(line) for line in said.splitlines()]
    assert [each["event"] for each in told] == ["text", "audio", "text", "audio", "done"]
    assert [each["seq"] for each in told if each["event"] == "audio"] == [0, 1]
