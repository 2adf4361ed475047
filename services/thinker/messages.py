"""The messages of a conditioning track, numbered."""

import torch

from shared.messages import ConditioningRows
from shared.vllm.tensors import pack_positions, pack_rows


class TrackMessages:
    """Base of a family's :class:`services.thinker.family.TrackWriter`: numbers messages and rows."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._seq = self._written = 0

    def _message(self, rows: torch.Tensor, positions: torch.Tensor, last: bool) -> ConditioningRows:
        """The next message: rows ``[m, width]``, which are shared and not copied, at ids ``[3, m]``."""
        message = ConditioningRows(
            request_id=self.request_id,
            seq=self._seq,
            start=self._written,
            rows=pack_rows(rows),
            additional=pack_positions(positions),
            last=last,
        )
        self._seq += 1
        self._written += rows.shape[0]
        return message
