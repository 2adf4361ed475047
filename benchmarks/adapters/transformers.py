"""transformers' own ``generate`` in a process: one request after another, the whole answer at its end."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Final, Self

import msgspec

from benchmarks.adapters.reference import Ask, Reply
from benchmarks.measure.answer import MeasuredAnswer
from benchmarks.measure.counters import Counters
from benchmarks.measure.workload import SPEAKER, Workload
from omnirelay.errors import OmniRelayError

MAX_LINE_BYTES: Final = 2**24
STOP_S: Final = 10.0


class Transformers:
    """``generate`` of the whole model in a child process.

    Args:
        model: Directory of the checkpoint.

    Attributes:
        threads: Threads that it computes with; at first PyTorch's default, one for each core.
    """

    name = "transformers"

    def __init__(self, model: Path) -> None:
        self.pids: dict[str, int] = {}
        self.threads = len(os.sched_getaffinity(0))
        self._model = model
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Start the process, and wait until the model is loaded."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.adapters.reference"),
            str(self._model),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            # Ctrl-C is for the harness, which then closes its input.
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
        )
        self.pids = {self.name: self._process.pid}
        await self._line()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the process."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def answer(
        self, workload: Workload, index: int, heard: asyncio.Future[float] | None = None
    ) -> MeasuredAnswer:
        """Ask, once those who asked before have their answers."""
        ask = Ask(
            prompt=workload.prompt(index),
            speaker=SPEAKER,
            text_tokens=workload.text_tokens,
            codec_tokens=workload.codec_tokens,
            threads=self.threads,
        )
        sent = time.monotonic()
        async with self._turn:
            if self._process is None or self._process.stdin is None:
                raise OmniRelayError("transformers was not started")
            self._process.stdin.write(msgspec.json.encode(ask) + b"\n")
            reply = msgspec.json.decode(await self._line(), type=Reply)
        done = time.monotonic()
        if heard is not None:
            heard.set_result(done - sent)
        return MeasuredAnswer(
            index=index,
            sent=sent,
            first_text=done,
            pieces=[(done, reply.samples)],
            done=done,
            text_ids=reply.text_ids,
            codec_ids=reply.codec_ids,
        )

    async def counters(self) -> Counters:
        """None: it counts nothing."""
        return Counters()

    async def _line(self) -> bytes:
        if self._process is None or self._process.stdout is None:
            raise OmniRelayError("transformers was not started")
        line = await self._process.stdout.readline()
        if not line:
            raise OmniRelayError("the process with transformers ended; its last words are above")
        return line
