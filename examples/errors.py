"""What may go wrong, and how an answer is ended: a refusal, a time limit, a `break`, a lost gateway."""

import argparse
import asyncio

from omnirelay import AsyncClient, TextEvent
from omnirelay.errors import GatewayUnreachableError, InvalidRequestError, RequestError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", default="tcp://127.0.0.1:5555")
parser.add_argument("--seconds", type=float, default=5.0, help="the time limit")
arguments = parser.parse_args()
QUESTION = "What is twenty plus sixteen?"


async def main(client: AsyncClient) -> None:
    """Ask in several ways."""
    try:
        await client.chat(QUESTION, temperature=-1).result()
    except InvalidRequestError as error:
        # Errors of one request; the connection goes on.
        print(f"refused: {error}")
    try:
        async with asyncio.timeout(arguments.seconds):
            result = await client.chat(QUESTION).result()
        print(f"answered: {result.text}")
    except TimeoutError:
        # Leaving the block has cancelled the request at every stage.
        print(f"not within {arguments.seconds:g} s")
    except RequestError as error:
        # `error.code` says which: busy, stage_failed, ... (docs/errors.md).
        print(f"failed: {error.code}: {error}")
    async for event in client.chat(QUESTION, speech=False):
        if isinstance(event, TextEvent):
            print(f"the first words, which are enough: {event.text}")
            # So does leaving the loop.
            break


async def connect() -> None:
    """Connect, and say so if nobody is there."""
    try:
        async with AsyncClient(arguments.address) as client:
            await main(client)
    except GatewayUnreachableError as error:
        print(f"no server: {error}")


asyncio.run(connect())
