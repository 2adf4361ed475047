"""Turns the thinker's rows into the talker's conditioning track, message by message."""

import torch

from services.thinker.messages import TrackMessages
from shared.messages import ConditioningRows


class QwenTrackWriter(TrackMessages):
    """One request's conditioning track, as transformers builds it in ``generate``.

    The talker's positions are: the prompt's n tokens, the voice's start token, then the reply's tokens
    (all but the last, which is never computed), the text end token and the text pad token; the last
    row repeats for as long as the talker talks.

    Position ids are the thinker's in the prompt, and run on by one behind its last token for the two start
    positions; from then on they count from the largest so far, which may be that of a picture or video.

    The text embeddings are ``[hidden]`` of the voice's start token, ``[2, hidden]`` of the closing tokens.
    """

    def __init__(
        self, request_id: str, prompt_tokens: int, voice_row: torch.Tensor, closing_rows: torch.Tensor
    ) -> None:
        super().__init__(request_id)
        self.prompt_rows = prompt_tokens
        self._voice_row = voice_row
        self._closing_rows = closing_rows
        self._next_position = 0
        self._largest_position = 0

    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        """The message for rows ``[m, hidden]`` from position ``start`` on, at M-RoPE ids ``[3, m]``."""
        in_prompt = max(0, min(self.prompt_rows - start, rows.shape[0]))
        parts, part_positions = [], []
        if in_prompt:
            parts, part_positions = [rows[:in_prompt]], [positions[:, :in_prompt]]
            self._next_position = int(positions[:, in_prompt - 1].max()) + 1
            self._largest_position = max(self._largest_position, int(positions[:, :in_prompt].max()))
        if in_prompt and start + in_prompt == self.prompt_rows:
            parts.append(self._voice_row.unsqueeze(0))
            part_positions.append(self._run_on(1))
        if in_prompt < rows.shape[0]:
            parts.append(rows[in_prompt:])
            part_positions.append(self._reply_positions(start + in_prompt, rows.shape[0] - in_prompt))
        if len(parts) == 1:
            # Rows are shared with the message, not copied.
            return self._message(parts[0], part_positions[0], last=False)
        return self._message(torch.cat(parts), torch.cat(part_positions, dim=1), last=False)

    def close(self) -> ConditioningRows:
        """The last message; a reply of a single token has no row: the track ends as it is."""
        has_reply = self._written > self.prompt_rows + 1
        rows = self._closing_rows if has_reply else self._closing_rows[:0]
        return self._message(rows, self._run_on(rows.shape[0]), last=True)

    def _reply_positions(self, start: int, count: int) -> torch.Tensor:
        """Position ids of reply tokens ``[3, count]``, the first of which stands at ``start``."""
        if start > self.prompt_rows:
            return self._run_on(count)
        first = self._run_on(1)
        self._next_position = max(self._next_position, self._largest_position + 1)
        return torch.cat([first, self._run_on(count - 1)], dim=1)

    def _run_on(self, count: int) -> torch.Tensor:
        first = self._next_position
        self._next_position += count
        return torch.arange(first, first + count).expand(3, count)
