"""Realtime sessions outlive their connections: no event is lost or comes twice, and only owners resume."""

import asyncio
import base64
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.http.realtime.items import read_item
from gateway.http.realtime.websocket import Outbox
from gateway.requests.metrics import ResumeOutcome
from shared.config import Config
from shared.messages import ThinkRequest
from tests.gateway.bench import KEY, OTHER, Configure, Patch
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway
from tests.gateway.realtime import ANSWER, CHUNKS, HELLO, PUSH_TO_TALK, TONE, ask, idle, recording, talking


class Caller:
    """A client that can resume its session."""

    def __init__(self, b: HttpBench, key: str | None = None) -> None:
        self.url = b.url.replace("http:", "ws:") + "/v1/realtime"
        self.events: list[dict[str, Any]] = []
        self.sent: list[str] = []
        self.last = 0
        self.id = self.secret = ""
        self.key = key
        self.socket: ClientConnection

    async def dial(self, query: str, secret: str | None = None, browser: bool = False) -> dict[str, Any]:
        """Connect, and return the first event."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        options: dict[str, Any] = {}
        if secret is not None and browser:
            options["subprotocols"] = ["realtime", f"omnirelay-resume-secret.{secret}"]
        elif secret is not None:
            headers["OmniRelay-Resume-Secret"] = secret
        self.socket = await connect(
            f"{self.url}?{query}", additional_headers=headers, ping_interval=None, **options
        )
        first: dict[str, Any] = json.loads(await self.socket.recv())
        return first

    async def begin(self) -> "Caller":
        created = await self.dial("resume=true")
        self.note(created)
        self.id, self.secret = created["session"]["id"], created["resume"]["secret"]
        await self.send("session.update", session=PUSH_TO_TALK)
        await self.take("session.updated")
        return self

    async def resume(self, browser: bool = False) -> None:
        resumed = await self.dial(self.place, self.secret, browser)
        assert (resumed["type"], resumed["session"]) == ("session.resumed", {"id": self.id})
        for event in self.sent[resumed["received_events"] :]:
            await self.socket.send(event)

    def cut(self) -> None:
        self.socket.transport.abort()

    async def send(self, kind: str, **fields: Any) -> None:
        self.sent.append(json.dumps({"type": kind, **fields}))
        await self.socket.send(self.sent[-1])

    async def say(self, pcm: bytes) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    async def ask(self, b: HttpBench) -> ThinkRequest:
        """Ask something that no stage has answered yet."""
        await self.send("conversation.item.create", item={**HELLO, "id": "item_asked"})
        await self.send("response.create")
        return await b.stages.request(0)

    @property
    def place(self) -> str:
        """How to go on where this client is."""
        return f"session_id={self.id}&starting_after={self.last}"

    def note(self, event: dict[str, Any]) -> None:
        assert event["sequence_number"] == self.last + 1, "each event once, in order"
        self.last += 1
        self.events.append(event)

    async def take(self, kind: str) -> dict[str, Any]:
        """The next event of this type."""
        while True:
            self.note(json.loads(await self.socket.recv()))
            if self.events[-1]["type"] == kind:
                return self.events[-1]

    @property
    def told(self) -> str:
        """All events, with what is random replaced by when it came first."""
        names: dict[str, int] = {}
        text = json.dumps(self.events[1:])
        return re.sub(
            r"\b(sess|resp|item)_[0-9a-f]+\b|\b[0-9a-f]{24}\b",
            lambda m: f"{names.setdefault(m[0], len(names))}",
            text,
        )


@asynccontextmanager
async def calling(config: Config, key: str | None = None) -> AsyncIterator[tuple[HttpBench, Caller]]:
    async with http_bench(config) as b:
        caller = await Caller(b, key).begin()
        try:
            yield b, caller
        finally:
            await caller.socket.close()


@pytest.fixture(name="caller")
async def _caller(web: HttpBench) -> AsyncIterator[Caller]:
    caller = await Caller(web).begin()
    yield caller
    await caller.socket.close()


def detached(b: HttpBench, connection: str = "detached") -> float:
    return b.process.gateway.metrics.sessions.labels(connection)._value.get()


def connected(b: HttpBench) -> float:
    return detached(b, "websocket")


def resumes(b: HttpBench, outcome: ResumeOutcome) -> float:
    return b.process.gateway.metrics.session_resumes.labels(outcome)._value.get()


async def lose(b: HttpBench, caller: Caller) -> None:
    """Cut the connection, and wait until the gateway knows."""
    before = detached(b)
    caller.cut()
    await until(lambda: detached(b) == before + 1, "a session without a connection")


async def refused(caller: Caller, query: str, secret: str) -> dict[str, Any]:
    """Ask for a session that is not given: a new one comes, and the error says so."""
    created = await caller.dial(query, secret)
    assert created["type"] == "session.created"
    assert created["session"]["id"] != caller.id
    assert created["resume"]["secret"] != caller.secret
    error: dict[str, Any] = json.loads(await caller.socket.recv())["error"]
    assert error["code"] == "session_not_resumed"
    return error


async def answered(b: HttpBench, caller: Caller, how: str) -> str:
    """Have a question answered, with a cut in the middle of the answer unless there is none."""
    name = (await caller.ask(b)).request_id
    await b.stages.text(name, 0, b.encode(ANSWER), "stop")
    await b.stages.audio(name, 0, CHUNKS[0].tobytes())
    await caller.take("response.output_audio.delta")
    if how in {"answered meanwhile", "resumed meanwhile", "browser"}:
        await lose(b, caller)
    if how in {"resumed meanwhile", "browser"}:
        await caller.resume(how == "browser")
    await b.stages.codec(name, 0, [7] * 10, "stop")
    for seq, chunk in enumerate(CHUNKS[1:], 1):
        await b.stages.audio(name, seq, chunk.tobytes(), last=seq == len(CHUNKS) - 1)
    if how == "answered meanwhile":
        # The answer is complete before its client is back.
        await until(lambda: not b.process.gateway._active, "the end of the answer")
        await caller.resume()
    await caller.take("response.done")
    return caller.told


async def test_an_answer_goes_on_and_no_event_is_lost_or_comes_twice(configure: Configure) -> None:
    told = {}
    for how in ("uncut", "answered meanwhile", "resumed meanwhile", "browser"):
        async with calling(configure(http_gateway())) as (b, caller):
            told[how] = await answered(b, caller, how)
            assert resumes(b, "resumed") == (how != "uncut")
        await idle(b)
    assert told["uncut"].count("response.output_audio.delta") == len(CHUNKS)
    assert len(set(told.values())) == 1


async def test_a_question_that_is_cut_is_heard_whole(web: HttpBench, answers: None, caller: Caller) -> None:
    pieces = [TONE[at : at + 1200] for at in range(0, len(TONE), 1200)]
    for number, piece in enumerate(pieces):
        await caller.say(piece)
        if number in {5, 9}:
            # What was sent last may have arrived, or not.
            await lose(web, caller)
            await caller.resume()
    await caller.send("input_audio_buffer.commit")
    await caller.send("response.create")
    await caller.take("response.done")
    assert [recording(item) for item in web.stages.requests[0].media] == [TONE]


async def test_an_idle_session_is_as_it_was(web: HttpBench, answers: None, caller: Caller) -> None:
    await caller.send("conversation.item.create", item={**HELLO, "id": "item_kept"})
    await caller.take("conversation.item.done")
    for _ in "123":
        await lose(web, caller)
        await caller.resume()
    await caller.send("conversation.item.retrieve", item_id="item_kept")
    kept = await caller.take("conversation.item.retrieved")
    assert kept["item"]["content"][0]["text"] == "Hello"
    # The settings, too: with turn detection this would say that speech has begun.
    await caller.say(TONE)
    await caller.send("input_audio_buffer.commit")
    assert (await caller.take("input_audio_buffer.committed"))["previous_item_id"] == "item_kept"
    await caller.socket.close()
    await idle(web)
    assert detached(web) == 0


async def test_only_the_owner_resumes_a_session(configure: Configure, keys: str) -> None:
    async with calling(configure(http_gateway(api_keys=keys)), KEY) as (b, caller):
        await lose(b, caller)
        query = caller.place
        for key, asked, secret in (
            (KEY, query, "wrong"),
            (KEY, query, "é" * 43),
            (KEY, query.replace(caller.id, "sess_unknown"), caller.secret),
            (OTHER, query, caller.secret),
        ):
            other = Caller(b, key)
            other.id, other.secret = caller.id, caller.secret
            assert "has ended" in (await refused(other, asked, secret))["message"]
            await other.socket.close()
        stranger = Caller(b, "unknown")
        with pytest.raises(InvalidStatus):
            await stranger.dial(query, caller.secret)
        assert resumes(b, "refused") == 4
        await caller.resume()
        await caller.send("input_audio_buffer.clear")
        await caller.take("input_audio_buffer.cleared")


async def test_a_client_that_is_too_late_gets_a_new_session(configure: Configure) -> None:
    async with calling(configure(http_gateway(realtime_resume_s=0.2))) as (b, caller):
        request = await caller.ask(b)
        caller.cut()
        await until(lambda: resumes(b, "expired") == 1, "the end of the session")
        await b.stages.aborted(request.request_id)
        await idle(b)
        await refused(caller, caller.place, caller.secret)
        assert b.counts["cancelled"] == 1


@pytest.mark.parametrize("after", ["4", "99"])
async def test_sessions_without_kept_events_end(configure: Configure, monkeypatch: Patch, after: str) -> None:
    told: list[str] = []

    async def send(outbox: Outbox, kind: str, fields: dict[str, Any]) -> None:
        told.append(kind)
        await send_as_before(outbox, kind, fields)

    send_as_before = Outbox.send
    monkeypatch.setattr(Outbox, "send", send)
    # A new session has a place if the one before has ended.
    monkeypatch.setattr("gateway.http.realtime.endpoint.MAX_SESSIONS", 1)

    async with calling(configure(http_gateway(), realtime_resume_bytes=3000)) as (b, caller):
        await caller.send("conversation.item.create", item=HELLO)
        await caller.take("conversation.item.done")
        assert caller.last == 4
        await caller.send("response.create")
        name = (await b.stages.request(0)).request_id
        await lose(b, caller)
        await b.stages.text(name, 0, b.encode(ANSWER), "stop")
        await b.stages.codec(name, 0, [7] * 10, "stop")
        await b.stages.audio(name, 0, CHUNKS[0].tobytes(), last=True)
        await until(lambda: "response.done" in told, "the end of the answer")
        error = await refused(caller, f"session_id={caller.id}&starting_after={after}", caller.secret)
        assert error["param"] == "starting_after"
        await until(lambda: detached(b) == 0, "the end of the session before")
        assert connected(b) == 1
        await until(lambda: b.process.gateway.held.total == 3000, "nothing held but for the new one")
        await caller.socket.close()
        await until(lambda: connected(b) == 0, "no session")
        error = await refused(caller, f"session_id={caller.id}&starting_after=4", caller.secret)
        assert "has ended" in error["message"]


async def test_a_malformed_number_ends_no_session(caller: Caller) -> None:
    for after in ("-1", "x", "", "9" * 5000):
        with pytest.raises(InvalidStatus) as refusal:
            await caller.dial(f"session_id={caller.id}&starting_after={after}", caller.secret)
        assert b'"param":"starting_after"' in refusal.value.response.body
    await caller.resume()


async def handed_over(older: ClientConnection) -> None:
    """Its session, or its place, goes to another connection."""
    with pytest.raises(ConnectionClosed) as closed:
        await older.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "taken_over")


async def test_nothing_is_held_for_a_session_that_was_replaced(
    web: HttpBench, caller: Caller, monkeypatch: Patch
) -> None:
    reading, goes_on = threading.Event(), threading.Event()

    def read(values: Any, *arguments: Any) -> Any:
        reading.set()
        assert goes_on.wait(60)
        return read_item(values, *arguments)

    monkeypatch.setattr("gateway.http.realtime.session.read_item", read)
    await caller.send("conversation.item.create", item=HELLO)
    await until(reading.is_set, "an item that is read")
    older = caller.socket
    new = asyncio.create_task(refused(caller, f"session_id={caller.id}&starting_after=99", caller.secret))
    await handed_over(older)
    goes_on.set()
    await new
    await until(lambda: (connected(web), detached(web)) == (1, 0))
    await caller.socket.close()
    await idle(web)


async def test_the_newer_connection_takes_over(web: HttpBench, answers: None, caller: Caller) -> None:
    for _ in "123":
        older = caller.socket
        await caller.resume()
        await handed_over(older)
    await caller.ask(web)
    await caller.take("response.done")
    assert (resumes(web, "taken_over"), detached(web)) == (3, 0)


async def test_a_gateway_that_stops_waits_for_nobody(web: HttpBench, caller: Caller) -> None:
    request = await caller.ask(web)
    await lose(web, caller)
    draining = asyncio.create_task(web.process.drain(60, asyncio.Event()))
    await web.stages.aborted(request.request_id)
    await draining
    await idle(web)
    assert (detached(web), resumes(web, "expired")) == (0, 1)


async def test_sessions_without_a_connection_count(configure: Configure, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.http.realtime.endpoint.MAX_SESSIONS", 2)

    async with calling(configure(http_gateway())) as (b, first):
        second = await Caller(b).begin()
        for each in (first, second):
            await lose(b, each)
        with pytest.raises(InvalidStatus) as full:
            await Caller(b).begin()
        assert full.value.response.status_code == 429
        await first.resume()
        await second.resume()
        await second.socket.close()
        await until(lambda: connected(b) == 1)
        third = await Caller(b).begin()
        await third.socket.close()


async def test_what_is_kept_counts_as_held(configure: Configure) -> None:
    config = configure(http_gateway(), {"max_request_bytes": 2**20}, held_bytes=6 * 2**20)
    async with calling(config) as (b, _):
        assert b.process.gateway.held.total == 4 * 2**20
        with pytest.raises(InvalidStatus) as full:
            await Caller(b).begin()
        assert full.value.response.status_code == 429
        await Caller(b).dial("model=omnirelay")


@pytest.mark.parametrize(("resume_s", "query"), [(30.0, {}), (0.0, {"resume": "true"})])
async def test_a_session_that_nobody_can_resume_ends_with_its_connection(
    configure: Configure, resume_s: float, query: dict[str, str]
) -> None:
    async with http_bench(configure(http_gateway(realtime_resume_s=resume_s))) as b:
        async with talking(b, extra_query=query) as c:
            await c.conversation.item.create(item=HELLO)
            await c.response.create()
            request = await b.stages.request(0)
            assert "sequence_number" not in (await c.recv()).to_dict()
            c._connection.transport.abort()
            await b.stages.aborted(request.request_id)
            await idle(b)
        assert (detached(b), resumes(b, "expired")) == (0, 0)


async def test_openais_client_takes_what_it_does_not_know(web: HttpBench, answers: None) -> None:
    async with talking(web, extra_query={"resume": "true"}) as c:
        await c.conversation.item.create(item=HELLO)
        events = await ask(c)
        assert [event.sequence_number for event in events] == list(range(3, 3 + len(events)))
    await idle(web)


async def test_an_event_of_a_cancelled_sender_is_sent() -> None:
    outbox, written, blocked = Outbox(0), list[str](), asyncio.Event()

    async def write(text: str) -> None:
        await blocked.wait()
        written.append(json.loads(text)["type"])

    writing = asyncio.create_task(outbox.write(write, asyncio.Event()))
    senders = [asyncio.create_task(outbox.send(kind, {})) for kind in "abc"]
    await asyncio.sleep(0)
    senders[1].cancel()
    blocked.set()
    await asyncio.gather(*senders, return_exceptions=True)
    writing.cancel()
    assert written == ["a", "b", "c"]
