"""The way of conditioning rows from the engine's memory to the talker."""

from collections.abc import Callable

import torch
from vllm.v1.engine.llm_engine import LLMEngine

from services.thinker.scheduler import ThinkerScheduler
from services.thinker.track import TrackWriter
from shared.messages import ConditioningRows, TalkerInput
from shared.stage.service import Failures
from shared.transport.routing import Outlet


class RowSender:
    """Reads the rows of each step, and sends each request its own in messages of bounded bytes."""

    def __init__(
        self,
        engine: LLMEngine,
        scheduler: ThinkerScheduler,
        talker: Outlet[TalkerInput],
        max_payload_bytes: int,
        further_rows: int,
    ) -> None:
        self.sent = 0
        self._engine = engine
        self._scheduler = scheduler
        self._talker = talker
        self._max_payload_bytes = max_payload_bytes
        self._further_rows = further_rows

    def send(self, track_of: Callable[[str], TrackWriter | None], failures: Failures) -> None:
        """Send what the last step made readable, by requests' tracks; not those rows that nobody wants."""
        reads = self._scheduler.take_reads()
        if not reads:
            return
        rows, positions = self._engine.collective_rpc("read_rows")[0]
        first = 0
        for read in reads:
            last = first + read.slots.shape[0]
            if track := track_of(read.engine_id):
                with failures.only(track.request_id):
                    self._send_track(track, read.start, rows[first:last], positions[:, first:last])
            first = last

    def close(self, track: TrackWriter) -> None:
        """Send the last message of a track; raises QueueFullError if the talker's queue is full."""
        self._put(track.close())

    def _send_track(
        self, track: TrackWriter, start: int, rows: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Send a request's next rows, in several messages: the prefix cache may hold many of a prompt."""
        room = self._max_payload_bytes // (rows.shape[1] * rows.dtype.itemsize)
        most = max(1, room - self._further_rows)
        for first in range(0, rows.shape[0], most):
            last = first + most
            self._put(track.rows(start + first, rows[first:last], positions[:, first:last]))

    def _put(self, message: ConditioningRows) -> None:
        self._talker.put(message)
        self.sent += message.rows.shape[0]
