"""Token2wav as a vLLM pooling model without attention layers of vLLM's, hence without a KV cache."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.model_executor.models.interfaces_base import attn_type
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from omnirelay.errors import CheckpointError
from services.token2wav.qwen2_5_omni.checkpoint import component_configs
from services.token2wav.qwen2_5_omni.conditioning import Conditioner, check_speakers
from services.token2wav.qwen2_5_omni.dit import DiffusionTransformer
from services.token2wav.qwen2_5_omni.pooler import SolverPooler
from services.token2wav.qwen2_5_omni.vocoder import Vocoder
from shared.model_files import SPEAKER_FILE
from shared.vllm.speakers import load_speakers

ARCHITECTURE = "OmniRelayToken2Wav"

_DIT, _VOCODER = "code2wav_dit_model.", "code2wav_bigvgan_model."
# Buffers that older releases of transformers wrote into checkpoints; they are computed here.
_COMPUTED = ["rotary_embed.inv_freq", "sample.filter"]


@attn_type("attention_free")
class Token2WavForSynthesis(nn.Module, IsAttentionFree):
    """DiT and vocoder behind the interface of a vLLM pooling model.

    Its tokens are solver steps and carry nothing: ``forward`` returns zeros and the work is the
    pooler's.  Weights are float32, as the reference insists (``Qwen2_5OmniForConditionalGeneration``).

    Raises:
        CheckpointError: the configuration or the speaker file does not fit.
    """

    is_pooling_model = True
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "talker.": None,
            f"token2wav.{_DIT}": "dit.",
            f"token2wav.{_VOCODER}": "vocoder.bigvgan.",
            _DIT: "dit.",
            _VOCODER: "vocoder.bigvgan.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        del prefix
        dit_config, bigvgan_config = component_configs(vllm_config.model_config.hf_config)
        self._model_dir = Path(vllm_config.model_config.model)
        self._hidden_size = vllm_config.model_config.get_hidden_size()
        speakers = load_speakers(self._model_dir)
        check_speakers(speakers, dit_config, self._model_dir / SPEAKER_FILE)
        self.dit = DiffusionTransformer(dit_config).float()
        self.vocoder = Vocoder(bigvgan_config).float()
        self.pooler = SolverPooler(self.dit, self.vocoder, Conditioner(self.dit, speakers))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> zeros, float32 [tokens, hidden]."""
        return torch.zeros(input_ids.shape[0], self._hidden_size, device=input_ids.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return zeros, float32 [tokens, hidden]: see the class."""
        del input_ids, intermediate_tensors, inputs_embeds
        return torch.zeros(positions.shape[-1], self._hidden_size, device=positions.device)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load every tensor of token2wav, and skip those of the other stages.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of another shape.
        """
        loader = AutoWeightsLoader(self, ignore_unexpected_suffixes=_COMPUTED)
        try:
            loaded: set[str] = loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)
        except (ValueError, AssertionError, RuntimeError) as error:
            raise CheckpointError(f"{self._model_dir}: token2wav: {error}") from error
        missing = sorted(name for name, _ in self.named_parameters() if name not in loaded)
        if missing:
            names = [
                name.replace("dit.", f"token2wav.{_DIT}", 1).replace(
                    "vocoder.bigvgan.", f"token2wav.{_VOCODER}", 1
                )
                for name in missing
            ]
            raise CheckpointError(
                f"{self._model_dir}: {len(names)} tensors are missing, the first is {names[0]}"
            )
        return loaded
