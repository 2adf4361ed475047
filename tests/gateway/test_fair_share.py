"""No client gets so much of the gateway that others get nothing: the line, its places, and room for bytes."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fairness.admission import FEW, OLDEST_EVERY, TIMES_FREE_ACTIVE, Admission
from gateway.fairness.fair_queue import FairQueue
from gateway.fairness.quota import MemoryBudget
from gateway.fairness.thread import FairSemaphore
from omnirelay.errors import BusyError
from tests.gateway.bench import Configure, bench
from tests.gateway.fake_stages import until

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "come", "finish", "cancel"]), st.integers(0, 5), st.integers(-1, 1)
    ),
    max_size=120,
)


class Crowd:
    """Clients before an admission, and a record of who was served when."""

    def __init__(self, max_active: int, max_queued: int) -> None:
        self.bounds = max_active, max_active + max_queued
        self.admission = Admission(max_active, max_queued)
        self.waiting: dict[str, tuple[str, int]] = {}
        self.active: dict[str, str] = {}
        self.overtaken: Counter[str] = Counter()
        """How often a client's first request in line was overtaken by one of the same priority."""
        self.came = self.ended = self.started = 0

    def come(self, client: str, priority: int = 0) -> str | None:
        try:
            with self.admission.preparing(client):
                pass
        except BusyError:
            return None
        name = f"{client}/{self.came}"
        self.came += 1
        self.admission.enter(name, priority, client)
        self.waiting[name] = client, priority
        self.serve()
        return name

    def leave(self, name: str) -> None:
        self.admission.leave(name, 1.0 if name in self.active else None)
        self.waiting.pop(name, None)
        self.active.pop(name, None)
        self.overtaken.pop(name, None)
        self.ended += 1
        self.serve()

    def serve(self) -> list[str]:
        served = []
        while (name := self.admission.next()) is not None:
            client, priority = self.waiting[name]
            able = {each for other, each in self.waiting.values() if self.may(other)}
            oldest = next(each for other, each in self.waiting.values() if self.may(other))
            turn = self.started % OLDEST_EVERY == OLDEST_EVERY - 1
            assert priority == (oldest if turn else min(able))
            self.started += 1
            heads: dict[tuple[str, int], str] = {}
            for each, key in self.waiting.items():
                heads.setdefault(key, each)
            assert heads[client, priority] == name, "a client's own requests keep their order"
            self.overtaken.update(
                each for (_, other), each in heads.items() if other == priority and each != name
            )
            self.overtaken.pop(name, None)
            del self.waiting[name]
            self.admission.start(name)
            self.active[name] = client
            served.append(name)
        self.check()
        return served

    def may(self, client: str) -> bool:
        """Whether a client may have one more place."""
        own = Counter(self.active.values())[client]
        free = self.bounds[0] - len(self.active)
        return free > 0 and (not own or own < TIMES_FREE_ACTIVE * free)

    def check(self) -> None:
        assert len(self.active) <= self.bounds[0]
        assert len(self.active) + len(self.waiting) <= self.bounds[1]
        assert not any(self.may(client) for client, _ in self.waiting.values())
        assert all(times <= 2 * self.bounds[1] for times in self.overtaken.values()), self.overtaken


@given(st.integers(1, 4), st.integers(0, 12), STEPS)
@settings(max_examples=150, deadline=None)
def test_nobody_starves_and_everyone_leaves(
    max_active: int, max_queued: int, steps: list[tuple[str, int, int]]
) -> None:
    crowd = Crowd(max_active, max_queued)
    for step, value, priority in steps:
        if step == "come":
            crowd.come(f"client {value}", priority)
        else:
            those = list(crowd.active if step == "finish" else crowd.waiting)
            if those:
                crowd.leave(those[value % len(those)])
    while crowd.active:
        crowd.leave(next(iter(crowd.active)))
    assert not crowd.waiting
    assert crowd.came == crowd.ended
    assert crowd.admission._places.used == crowd.admission._thinking.used == 0
    assert not crowd.admission._queues
    assert not crowd.admission._entries


@settings(deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 60))
def test_a_first_request_waits_for_at_most_one_of_each_other_client(
    max_active: int, queued: list[int], served_before: int
) -> None:
    crowd = Crowd(max_active, 400)
    for index, number in enumerate(queued):
        for _ in range(number):
            crowd.come(f"client {index}")
    for _ in range(served_before):
        if crowd.active:
            crowd.leave(next(iter(crowd.active)))
    newcomer = crowd.come("newcomer")
    assert newcomer is not None
    between: Counter[str] = Counter()
    while newcomer not in crowd.active:
        already = set(crowd.active)
        crowd.leave(next(iter(crowd.active)))
        between.update(crowd.active[name] for name in crowd.active.keys() - already - {newcomer})
    assert all(times == 1 for times in between.values())


def test_clients_that_always_have_more_are_served_alike() -> None:
    crowd = Crowd(3, 100)
    served: Counter[str] = Counter()
    for _ in range(300):
        for client, wanted in (("a", 60), ("b", 5), ("c", 1)):
            while sum(each == client for each, _ in crowd.waiting.values()) < min(wanted, 5):
                assert crowd.come(client)
        name = next(iter(crowd.active))
        served[crowd.active[name]] += 1
        crowd.leave(name)
    assert max(served.values()) - min(served.values()) <= 3, served


def test_one_client_leaves_places_for_others() -> None:
    crowd = Crowd(16, 64)
    taken = sum(crowd.come("greedy") is not None for _ in range(200))
    assert taken == 76
    with pytest.raises(BusyError, match="this client holds 76 of 80 places"), ExitStack() as stack:
        stack.enter_context(crowd.admission.preparing("greedy"))
    while crowd.come("second"):
        pass
    assert len(crowd.waiting) == 64
    # All are taken now; the next that is free is for who has few.
    crowd.leave(next(iter(crowd.active)))
    assert crowd.come("greedy") is None
    assert crowd.come("third") is not None


def started(admission: Admission) -> list[str]:
    """Start all that may; gives their names."""
    names = []
    while (name := admission.next()) is not None:
        admission.start(name)
        names.append(name)
    return names


def test_speech_that_cannot_start_stops_no_aging() -> None:
    admission = Admission(2, 200)
    for number in range(2):
        admission.enter(f"speech {number}", 0, f"client {number}", speaks=True)
        admission.start(f"speech {number}")
        admission.leave_thinker(f"speech {number}")
    admission.enter("speech 2", 0, "client 2", speaks=True)
    admission.enter("patient", 9, "client 3")
    for number in range(OLDEST_EVERY):
        admission.enter(f"urgent {number}", 0, "client 4")
        name = admission.next()
        assert name is not None
        admission.start(name)
        if name == "patient":
            return
        admission.leave(name)
    raise AssertionError("it starved")


def test_speech_keeps_no_text_waiting() -> None:
    admission = Admission(2, 10)
    for number in range(4):
        admission.enter(f"speech {number}", 0, f"client {number}", speaks=True)
    assert started(admission) == ["speech 0", "speech 1"]
    admission.enter("text", 0, "client 0")
    assert admission.next() is None
    assert admission.leave_thinker("speech 0")
    assert not admission.leave_thinker("speech 0")
    # The places for speech are taken.
    assert started(admission) == ["text"]
    admission.leave("speech 0")
    assert admission.leave_thinker("speech 1")
    assert admission.next(speech=False) is None
    assert admission.next() == "speech 2"
    for name in ("speech 1", "speech 2", "speech 3", "text"):
        admission.leave(name)
    assert admission._places.used == admission._thinking.used == admission._speaking.used == 0


def test_places_follow_the_stages() -> None:
    admission = Admission(None, 10)
    for number in range(20):
        admission.enter(str(number), 0, f"client {number}")
    assert len(started(admission)) == FEW
    admission.follow(18, 1)
    assert len(started(admission)) == 2
    # A replica has gone: as many as are too many end first.
    admission.follow(4, 0)
    for name in range(14):
        admission.leave(str(name))
        assert started(admission) == []
    admission.leave("14")
    assert len(started(admission)) == 1
    admission.follow(0, 0)
    admission.leave("15")
    assert len(started(admission)) == 1
    for number in range(20, 30):
        admission.enter(str(number), 0, f"client {number}")
    with pytest.raises(BusyError, match="4 requests are being served and 10 wait"):
        admission.enter("30", 0)
    configured = Admission(1, 0)
    configured.follow(5, 5)
    configured.enter("one", 0)
    with pytest.raises(BusyError):
        configured.enter("two", 0)


def test_held_bytes_are_shared_and_one_request_may_have_all_of_them() -> None:
    held = MemoryBudget(1000, lambda: 7)
    whole = held.of("a")
    whole.grow(900)
    whole.grow(100)
    whole.release()
    first, second = held.of("a"), held.of("a")
    first.grow(850)
    with pytest.raises(BusyError, match="850 bytes of media are held, no room for 100") as busy:
        second.grow(100)
    assert busy.value.retry_after_ms == 7
    held.of("b").grow(100)
    assert held.total == 950


async def test_room_is_given_in_turn_and_nobody_waits_for_one_who_has_enough() -> None:
    room = FairSemaphore(10)
    got: list[str] = []
    async with AsyncExitStack() as stack:

        async def take(client: str) -> None:
            await stack.enter_async_context(room.take(client))
            got.append(client)

        for _ in range(8):
            await take("a")
        tasks = [asyncio.create_task(take(each)) for each in "abb"]
        # It has 8 of 10: the last ones are for whoever has fewer.
        await until(lambda: got == ["a"] * 8 + ["b"] * 2)
        assert len(room._waiting) == 1
        gone = asyncio.create_task(take("c"))
        await until(lambda: len(room._waiting) == 2)
        gone.cancel()
        await until(gone.done)
        assert len(room._waiting) == 1
        await stack.aclose()
        await asyncio.gather(tasks[0])
        assert got == ["a"] * 8 + ["b"] * 2 + ["a"]
    assert room._quota.used == len(room._waiting) == 0


async def test_a_waiter_that_is_cancelled_as_units_return_leaves_them_to_the_next() -> None:
    room = FairSemaphore(1)
    await room.enter("a")
    cancelled, next_one = (asyncio.create_task(room.enter(client)) for client in "bc")
    await asyncio.sleep(0)
    cancelled.cancel()
    # Before the task that waits knows of it.
    room.leave("a")
    await asyncio.wait_for(next_one, 10)
    assert cancelled.cancelled()
    room.leave("c")
    assert room._quota.used == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
@settings(deadline=None)
def test_all_who_wait_for_room_get_it_or_leave_nothing(wishes: list[tuple[int, bool]]) -> None:
    async def scenario() -> None:
        room = FairSemaphore(4)

        async def use(client: str) -> None:
            async with room.take(client):
                assert room._quota.used <= 4
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(use(str(client))) for client, _ in wishes]
        await asyncio.sleep(0)
        for task, (_, stays) in zip(tasks, wishes, strict=True):
            if not stays:
                task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert room._quota.used == len(room._waiting) == 0

    asyncio.run(scenario())


def test_who_is_not_in_a_line_may_leave_it() -> None:
    line = FairQueue(lambda _: False)
    line.join("a1", "a")
    for _ in range(2):
        line.leave("a1", "a")
        assert not line


@pytest.mark.parametrize("max_active", [1, 2])
async def test_sixty_requests_do_not_hold_up_another_client(configure: Configure, max_active: int) -> None:
    config = configure(max_active=max_active, max_queued=64)
    async with bench(config) as b, b.client() as greedy, b.client() as modest:
        many = [greedy.chat(f"Question {number}", speech=False) for number in range(60)]
        await until(lambda: b.counts["queued"] == 60 - max_active)
        one = modest.chat("Hi", speech=False)
        await until(lambda: b.counts["queued"] == 61 - max_active)
        await b.stages.answer(await b.stages.request(0), b.encode("Hello"))
        await b.stages.answer(await b.stages.request(max_active), b.encode("Modest"))
        assert (await one.result()).text == "Modest"
        for answer in many:
            answer.cancel()
