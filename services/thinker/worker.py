"""Reads out of the thinker's model that vLLM's worker does not offer by itself."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from services.thinker.model import SpeakingThinker


class ConditioningReader:
    """Mixed into vLLM's worker (``worker_extension_cls``), called by ``collective_rpc``."""

    model_runner: "GPUModelRunner"

    def read_rows(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[n, hidden]`` and M-RoPE positions int64 ``[3, n]`` at KV slots ``[n]``, on the CPU."""
        store = self._model().conditioning
        rows, positions = store.gather(slots.to(store.layer.kv_cache.device))
        return rows.cpu(), positions.cpu()

    def embed_tokens(self, token_ids: list[int]) -> torch.Tensor:
        """Text embeddings ``[n, hidden]`` of token ids, on the CPU."""
        model = self._model()
        table = model.language_model.model.embed_tokens
        with torch.inference_mode():
            ids = torch.tensor(token_ids, device=model.text_embeds.device)
            embeds: torch.Tensor = table(ids)
        return embeds.cpu()

    def _model(self) -> "SpeakingThinker":
        return self.model_runner.get_model()
