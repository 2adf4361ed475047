"""What a listener hears of a stage that is killed in the middle of its work: nothing."""

import asyncio
import signal
from collections.abc import AsyncIterable, AsyncIterator

import pytest

from benchmarks.quality.__main__ import Listening
from benchmarks.quality.answers import SpokenReply, ask_all, collected, held_out_requests, request
from labs.training.measure.recognizer import word_error_rate
from omnirelay import AsyncClient, AudioEvent
from omnirelay.client.types import ChatEvent
from tests.support.processes import wait_until
from tests.support.restarting import RestartingStack

pytestmark = [pytest.mark.quality, pytest.mark.timeout(600)]

COUNT = 2
WORD_ERRORS = 0.1


@pytest.fixture(scope="module")
def undisturbed(stack: RestartingStack) -> list[SpokenReply]:
    asked = [each for each in held_out_requests(COUNT) if each.kind.startswith("text")]
    return asyncio.run(ask_all(stack.address, asked, clients=len(asked)))


@pytest.mark.parametrize("victim", ["talker", "token2wav"])
async def test_a_killed_stage_is_not_heard(
    stack: RestartingStack, undisturbed: list[SpokenReply], victim: str
) -> None:
    deaths = len(stack.deaths)
    speaking = asyncio.Event()

    async def until_speech(events: AsyncIterable[ChatEvent]) -> AsyncIterator[ChatEvent]:
        async for event in events:
            if isinstance(event, AudioEvent):
                speaking.set()
            yield event

    async with AsyncClient(stack.address) as client, asyncio.TaskGroup() as group:
        answers = [
            group.create_task(collected(each.asked, until_speech(client.chat(request(each.asked)))))
            for each in undisturbed
        ]
        await speaking.wait()
        stack.signal(victim, signal.SIGKILL)
    replies = [answer.result() for answer in answers]

    wait_until(lambda: [death.name for death in stack.deaths[deaths:]] == [victim], "the death is seen")
    wait_until(stack.all_ready, "all replicas are ready again")
    assert [reply.text for reply in replies] == [reply.text for reply in undisturbed]
    assert [reply.ended for reply in replies] == [reply.ended for reply in undisturbed]
    hear = Listening().hear
    said = [hear(reply.samples) for reply in undisturbed]
    assert sum(len(words.split()) for words in said) > COUNT
    heard = [hear(reply.samples) for reply in replies]
    assert word_error_rate(list(zip(said, heard, strict=True))) <= WORD_ERRORS
