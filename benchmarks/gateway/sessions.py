"""Realtime sessions that only listen: what a microphone that is open costs the gateway."""

import asyncio
import json
import os
import tempfile
import time
from base64 import b64encode
from pathlib import Path
from typing import Final

from websockets.asyncio.client import ClientConnection, connect

from benchmarks.gateway.measure import SessionLevel, resident_bytes, thread_seconds
from benchmarks.gateway.processes import Cores, configuration, running
from benchmarks.measure.machine import Cpu

RATE: Final = 24_000
PIECE_S: Final = 0.1
SETTLE_S: Final = 3.0
"""From the last new session until the measurement."""
SILENCE: Final = json.dumps(
    {"type": "input_audio_buffer.append", "audio": b64encode(bytes(2 * round(RATE * PIECE_S))).decode()}
)


def measure_sessions(model: Path, sessions: int, seconds: float) -> SessionLevel:
    """Hold sessions whose clients send silence at the speed of speech.

    Raises:
        OmniRelayError: The gateway did not start.
        OSError, websockets.exceptions.WebSocketException: A session was not held.
    """
    cores = Cores.of_this_machine()
    before = os.sched_getaffinity(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(configuration(model, sessions), Path(folder), cores, 1) as stack,
    ):
        url = str(stack.config.gateway.http).replace("tcp:", "ws:")
        os.sched_setaffinity(0, cores.clients)
        try:
            return asyncio.run(_measure(url, stack.pids["gateway"], sessions, seconds))
        finally:
            os.sched_setaffinity(0, before)


async def _measure(url: str, pid: int, sessions: int, seconds: float) -> SessionLevel:
    empty = resident_bytes(pid)
    async with asyncio.TaskGroup() as group:
        listening = [group.create_task(_listen(url, number, sessions)) for number in range(sessions)]
        await asyncio.sleep(SETTLE_S)
        cpu, loop, began = Cpu({"gateway": pid}), thread_seconds(pid), time.monotonic()
        await asyncio.sleep(seconds)
        measured = time.monotonic() - began
        level = SessionLevel(
            sessions=sessions,
            seconds=measured,
            cpu=cpu.spent()["gateway"] / measured,
            loop_cpu=(thread_seconds(pid) - loop) / measured,
            bytes_per_session=(resident_bytes(pid) - empty) / sessions,
        )
        for each in listening:
            each.cancel()
    return level


async def _listen(url: str, number: int, sessions: int) -> None:
    # The gateway takes this machine for a proxy: each client has an address of its own.
    client = {"X-Forwarded-For": f"192.0.2.{number % 254 + 1}"}
    async with connect(f"{url}/v1/realtime?model=omnirelay", additional_headers=client) as socket:
        reading = asyncio.create_task(_read(socket))
        # Not all at the same moment.
        at = time.monotonic() + PIECE_S * number / sessions
        try:
            while not reading.done():
                await asyncio.sleep(at - time.monotonic())
                await socket.send(SILENCE)
                at += PIECE_S
            await reading
        finally:
            reading.cancel()


async def _read(socket: ClientConnection) -> None:
    async for _ in socket:
        pass
