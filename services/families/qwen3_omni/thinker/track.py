"""Turns the thinker's rows into the talker's: what users have said, and the reply.

Reference: ``Qwen3OmniMoeForConditionalGeneration.generate``, ``_get_talker_assistant_parts``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from omnirelay.errors import InvalidRequestError
from services.thinker.track import TrackWriter
from shared.messages import ConditioningRows

HEADER: Final = 3
"""Tokens that begin a turn: the mark, the role, the end of the line."""
PADS: Final = 4
"""Rows of the pad token behind the header of the reply; the voice and its marks stand there."""


@dataclass(frozen=True)
class Roles:
    """Ids by which the turns of a prompt are told apart."""

    begin: int
    user: int
    assistant: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """Those of a checkpoint's configuration."""
        return cls(config.im_start_token_id, config.user_token_id, config.assistant_token_id)

    def reply_start(self, prompt: Sequence[int]) -> int:
        """Where the last turn of the assistant begins; raises InvalidRequestError if it has none."""
        starts = (at for at in range(len(prompt) - 2, -1, -1) if prompt[at] == self.begin)
        found = next((at for at in starts if prompt[at + 1] == self.assistant), None)
        if found is None:
            raise InvalidRequestError(
                "the prompt has no turn of the assistant, so no reply can be spoken: send messages"
            )
        return found

    def spoken_to(self, prompt: Sequence[int]) -> list[int]:
        """The positions of the users' turns, which the talker sees."""
        found, role = [], prompt[min(1, len(prompt) - 1)]
        for at, token in enumerate(prompt):
            if token == self.begin:
                role = prompt[min(at + 1, len(prompt) - 1)]
            if role == self.user:
                found.append(at)
        return found


class ReplyTrackWriter(TrackWriter):
    """One request's conditioning track.

    The talker's positions are: the users' turns; the header of the reply, pads, the begin of its text and
    its first token; then the further tokens of the reply (all but the last, which is never computed), the
    end of the text and a pad; the last row repeats for as long as the talker talks.

    Position ids of the users' turns are as if there were no others between them; then they run on.  Behind
    the first token of the reply they count from the largest so far, which may be that of a picture.

    ``opening`` is ``[PADS + 1, width]``, ``closing`` ``[2, width]``.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        roles: Roles,
        opening: torch.Tensor,
        closing: torch.Tensor,
    ) -> None:
        spoken_to = roles.spoken_to(prompt)
        first_reply_row = len(spoken_to) + HEADER + PADS + 1
        super().__init__(request_id, len(spoken_to), first_reply_row, opening, closing)
        self._reply_start = roles.reply_start(prompt)
        if not spoken_to:
            raise InvalidRequestError("the prompt has no turn of a user, so no reply can be spoken")
        self._spoken_to = torch.zeros(len(prompt), dtype=torch.bool)
        self._spoken_to[spoken_to] = True
        self._segment: tuple[int, int] | None = None

    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        """See :meth:`TrackWriter.rows`."""
        stop = start + rows.shape[0]
        users = range(start, min(stop, self._reply_start))
        wanted = [at for at in users if self._spoken_to[at]]
        index = torch.tensor([at - start for at in wanted], dtype=torch.int64)
        opened = self._reply_start + HEADER
        parts = [rows[index], rows[max(self._reply_start - start, 0) : max(opened - start, 0)]]
        if start < opened <= stop:
            parts.append(self._opening)
        parts.append(rows[max(opened - start, 0) :])
        return self._message(parts, self._as_if_alone(wanted, positions[:, index]))

    def _as_if_alone(self, wanted: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """Position ids ``[3, m]`` of the users' turns, each moved to the end of the one before."""
        moved = positions.clone()
        for column, at in enumerate(wanted):
            if self._segment is None or self._segment[0] != at - 1:
                # A turn begins with text, whose three ids are equal.
                shift = self._next_position - int(positions[0, column])
            else:
                shift = self._segment[1]
            moved[:, column] += shift
            self._segment = at, shift
            self._next_position = int(moved[:, column].max()) + 1
            self._largest_position = max(self._largest_position, self._next_position - 1)
        return moved
