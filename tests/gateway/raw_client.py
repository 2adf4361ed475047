"""A client that says whatever a test wants, and what shows that others are served all the same."""

import asyncio

import msgspec

from omnirelay import ChatMessage, GenerateRequest
from omnirelay.protocol import (
    PROTOCOL_VERSION,
    ClientMessage,
    Hello,
    ServerMessage,
    Submit,
    Welcome,
    pack,
    parse_tcp,
    read_frame,
)
from tests.gateway.bench import Bench


class RawClient:
    """A TCP connection that says whatever the test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, b: Bench, greet: bool = True) -> "RawClient":
        client = cls(*await asyncio.open_connection(*parse_tcp(b.listen)))
        if greet:
            client.say(Hello(PROTOCOL_VERSION))
            assert isinstance(await client.hear(), Welcome)
        return client

    def say(self, message: ClientMessage) -> None:
        self.writer.write(pack(message))

    def say_bytes(self, body: bytes) -> None:
        self.writer.write(len(body).to_bytes(4, "big") + body)

    async def hear(self) -> ServerMessage:
        body = await read_frame(self.reader, 2**30)
        return msgspec.msgpack.decode(body, type=ServerMessage)

    async def closed(self) -> bool:
        """The gateway has hung up without another word."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            # It had not read all that was sent.
            return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            # The gateway hung up first, as it should.
            return


async def serves(b: Bench) -> None:
    """A well-behaved client is still served."""
    async with b.client() as client:
        index = len(b.stages.requests)
        answer = client.chat("Hi")
        await b.stages.answer(await b.stages.request(index), b.encode("Hello"))
        assert (await answer.result()).text == "Hello"


def submit(client_id: int, request: GenerateRequest) -> Submit:
    return Submit(client_id, msgspec.Raw(msgspec.msgpack.encode(request)))


HI = GenerateRequest(messages=[ChatMessage("user", "Hi")])
