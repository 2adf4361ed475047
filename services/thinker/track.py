"""The conditioning track of a request: what the talker is told of the thinker's tokens, and its way there."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from vllm.v1.engine.llm_engine import LLMEngine

from services.thinker.scheduler import ThinkerScheduler
from shared.messages import ConditioningRows, TalkerInput
from shared.stage.service import Failures
from shared.transport.routing import Outlet
from shared.vllm.tensors import pack_positions, pack_rows


class TrackWriter(ABC):
    """Turns the thinker's rows of one request into the rows that the talker is conditioned on.

    Position ids run on behind the prompt's; behind the first row of the reply they count from the largest so
    far, which may be that of a picture or video.

    Args:
        request_id: The request.
        prompt_rows: Rows of the prompt: what :attr:`SpeechStart.prompt_tokens` says.
        first_reply_row: Number of the first row that a token of the reply has.
        opening: Rows ``[n, width]`` that no token of the thinker has, between prompt and reply.
        closing: Rows ``[2, width]`` behind the reply; the last one repeats for as long as the talker talks.
    """

    def __init__(
        self,
        request_id: str,
        prompt_rows: int,
        first_reply_row: int,
        opening: torch.Tensor,
        closing: torch.Tensor,
    ) -> None:
        self.request_id = request_id
        self.prompt_rows = prompt_rows
        self._first_reply_row = first_reply_row
        self._opening, self._closing = opening, closing
        # Rows that have position ids; the next of these, and the largest of the prompt's.
        self._placed = self._next_position = self._largest_position = 0
        self._seq = self._written = 0

    @abstractmethod
    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        """The message for rows ``[m, width]`` from position ``start`` on, whose position ids are ``[3, m]``.

        Rows come in order, without gap; the message has at most :attr:`SpeechWriter.further_rows` more.
        """

    def close(self) -> ConditioningRows:
        """The last message; a reply of a single token has no row: the track ends as it is."""
        has_reply = self._written > self._first_reply_row
        closing = self._closing if has_reply else self._closing[:0]
        return self._message([closing], self._closing.new_empty(3, 0, dtype=torch.int64), last=True)

    def _message(
        self, parts: Sequence[torch.Tensor], ids: torch.Tensor, last: bool = False
    ) -> ConditioningRows:
        """The next message: rows ``[m, width]`` in parts, of which the first have the ids ``[3, k]``."""
        self._placed += ids.shape[1]
        following = self._run_on(sum(part.shape[0] for part in parts) - ids.shape[1])
        filled = [part for part in parts if part.shape[0]] or parts[:1]
        # Rows are shared with the message, not copied, unless they have to be joined.
        rows = filled[0] if len(filled) == 1 else torch.cat(list(filled))
        message = ConditioningRows(
            request_id=self.request_id,
            seq=self._seq,
            start=self._written,
            rows=pack_rows(rows),
            additional=pack_positions(torch.cat([ids, following], dim=1)),
            last=last,
        )
        self._seq += 1
        self._written += rows.shape[0]
        return message

    def _run_on(self, count: int) -> torch.Tensor:
        found = []
        for _ in range(count):
            if self._placed > self._first_reply_row:
                self._next_position = max(self._next_position, self._largest_position + 1)
            found.append(self._next_position)
            self._next_position += 1
            self._placed += 1
        return torch.tensor(found, dtype=torch.int64).expand(3, count)


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
