"""A TCP relay that can stop relaying without a word, as a link does that is cut."""

import asyncio
import threading
from typing import Self

from omnirelay.protocol import parse_tcp
from tests.support.ports import free_ports

PIECE = 2**16


class Relay:
    """Relays connections to an address, on a thread of its own.

    Attributes:
        address: Where it listens.
        refuses: Whether new connections are ended at once.
    """

    def __init__(self, target: str) -> None:
        self.address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        self.refuses = False
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        # Kept, or the collector would close what is cut.
        self._writers: list[asyncio.StreamWriter] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Relay nothing more of the connections that are there, and close none; new ones are relayed."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()

    def heal(self) -> None:
        """Close the connections that were cut, so that their ends connect anew."""

        def close() -> None:
            writers, self._writers = self._writers, []
            for writer in writers:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(close)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._relay, *parse_tcp(self.address))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.refuses:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(*parse_tcp(self._target))
        except OSError:
            # Nobody listens: neither does this.
            writer.transport.abort()
            return
        self._writers.append(back)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(_pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        self._server.close()
        await self._stop()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(PIECE):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        # The other direction sees the same.
        pass
    sink.close()
