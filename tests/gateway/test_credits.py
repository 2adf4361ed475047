"""The gateway gives, takes and passes on credits."""

import asyncio
from typing import Any

import zmq

from shared.messages import Credit, Mark, StageName, control_identity
from shared.transport.wire import Decoder, encode
from tests.gateway.bench import Bench, Configure, bench
from tests.gateway.fake_stages import until

CHANNEL = "0123456789abcdef"
SOUND = bytes(700_000)


class Listener:
    """A replica's control socket, without the replica."""

    def __init__(self, b: Bench, stage: StageName, name: str) -> None:
        self.identity = control_identity(stage, name)
        self.socket = b.stages.context.socket(zmq.DEALER)
        self.socket.set(zmq.IDENTITY, self.identity.encode())
        self.socket.connect(b.config.gateway.control)
        self._decoder: Decoder[Any] = Decoder(Credit)

    async def credit(self) -> Credit:
        credit: Credit = self._decoder.decode(await self.socket.recv_multipart())
        return credit

    async def send(self, message: object) -> None:
        await self.socket.send_multipart(encode(message))


async def test_the_gateway_answers_marks_of_stages(tcp: Bench) -> None:
    listener = Listener(tcp, "token2wav", "second")
    # It is known by what it says.
    await listener.send(Credit(sender=listener.identity, channel=CHANNEL, position=1))
    assert (await listener.credit()).position == 1
    await tcp.stages.events.send_multipart([b"spam"])
    await tcp.stages.send(Mark(sender=listener.identity, channel=CHANNEL, position=2))
    assert await listener.credit() == Credit(sender=listener.identity, channel=CHANNEL, position=2)
    listener.socket.close(0)


async def test_credit_for_a_stage_is_passed_on_and_for_nobody_dropped(tcp: Bench) -> None:
    thinker, talker = Listener(tcp, "thinker", "second"), Listener(tcp, "talker", "second")
    for sender in ("thinker.gone", "gateway.gone", thinker.identity):
        await thinker.send(Credit(sender=sender, channel=CHANNEL, position=1))
    assert (await thinker.credit()).sender == thinker.identity
    await talker.send(Credit(sender=thinker.identity, channel=CHANNEL, position=2))
    assert (await thinker.credit()).position == 2
    assert not tcp.process._transport.refused()
    thinker.socket.close(0)
    talker.socket.close(0)


async def test_requests_beyond_the_window_wait_for_the_thinkers_credit(configure: Configure) -> None:
    config = configure().model_copy(update={"window_bytes": 2**20})
    async with bench(config) as b, b.client() as client:
        b.stages.generous = False
        b.stages.serve([5, 6])
        (queue,) = b.process._transport._thinkers._queues.values()
        answers = [client.chat(f"Question {n}", audio=SOUND, speech=False) for n in range(5)]
        replies = asyncio.gather(*(answer.result() for answer in answers))
        await until(lambda: queue.backlog_bytes > 3 * len(SOUND))
        # The loop serves others meanwhile.
        assert (await client.status()).ready
        assert len(b.stages.requests) == 1
        assert queue.outstanding_bytes <= 2**20
        b.stages.generous = True
        assert len(await replies) == 5
        assert queue.backlog_bytes == 0


async def test_a_thinker_that_gives_more_credit_than_it_took_is_refused(tcp: Bench) -> None:
    link = tcp.process._transport
    (queue,) = link._thinkers._queues.values()
    listener = Listener(tcp, "thinker", "second")
    for channel, position in ((queue._window.channel, 10**9), ("f" * 16, 10**9)):
        await listener.send(Credit(sender=link._sending.sender, channel=channel, position=position))
    await until(lambda: link.refused()["message_invalid"] == 1)
    assert queue.outstanding_bytes == 0
    assert tcp.process.status().ready
    listener.socket.close(0)
