"""Turns the thinker's rows into the talker's conditioning track, message by message."""

import torch

from services.thinker.track import TrackWriter
from shared.messages import ConditioningRows


class QwenTrackWriter(TrackWriter):
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
        super().__init__(request_id, prompt_tokens, prompt_tokens + 1, voice_row.unsqueeze(0), closing_rows)

    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        """See :meth:`TrackWriter.rows`."""
        in_prompt = max(0, min(self.prompt_rows - start, rows.shape[0]))
        ids, parts = positions[:, :in_prompt], [rows[:in_prompt]]
        if in_prompt:
            self._next_position = int(ids[:, -1].max()) + 1
            self._largest_position = max(self._largest_position, int(ids.max()))
            if start + in_prompt == self.prompt_rows:
                parts.append(self._opening)
        return self._message([*parts, rows[in_prompt:]], ids)
