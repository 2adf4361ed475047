"""Token2wav of Qwen2.5-Omni as a vLLM pooling model, and as the stage takes it."""

from typing import Any, ClassVar, Final

import torch
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from services.families.qwen2_5_omni import SPEAKER_FILE, is_of_another
from services.families.qwen2_5_omni.token2wav.conditioning import Conditioner, check_speakers
from services.families.qwen2_5_omni.token2wav.dit import DiffusionTransformer, HalfLinear
from services.families.qwen2_5_omni.token2wav.synthesizer import (
    SolverSynthesizer,
    SolverWork,
    component_configs,
)
from services.families.qwen2_5_omni.token2wav.vocoder import Vocoder
from services.families.qwen2_5_omni.voices import load_speakers
from services.token2wav.family import SynthesisFamily
from services.token2wav.model import SynthesisModel
from services.token2wav.scheduler import records, synthesis_of
from shared.vllm.recorded import CudaGraphs


def vllm_projection(inputs: int, outputs: int) -> nn.Module:
    """A linear layer in float32 with vLLM's choice of kernel: twice as fast as PyTorch's on many CPUs."""
    layer: nn.Module = ReplicatedLinear(
        inputs, outputs, return_bias=False, params_dtype=torch.float32, disable_tp=True
    )
    return layer


_DIT, _VOCODER = "code2wav_dit_model.", "code2wav_bigvgan_model."


class Token2WavForSynthesis(SynthesisModel):
    """DiT and vocoder, float32 as the reference insists (``Qwen2_5OmniForConditionalGeneration``).

    Linear layers of the DiT's blocks may be bfloat16: see :attr:`shared.config.SynthesisConfig.precision`.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "talker.": None,
            _DIT: "dit.",
            _VOCODER: "vocoder.bigvgan.",
            f"token2wav.{_DIT}": "dit.",
            f"token2wav.{_VOCODER}": "vocoder.bigvgan.",
        }
    )
    # Buffers that older releases of transformers wrote into checkpoints.
    computed: ClassVar[list[str]] = ["rotary_embed.inv_freq", "sample.filter"]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        dit_config, bigvgan_config = component_configs(vllm_config.model_config.hf_config)
        speakers = load_speakers(self.directory)
        check_speakers(speakers, dit_config, self.directory / SPEAKER_FILE)
        # On a GPU vLLM's choice is PyTorch's own.
        plain = vllm_projection if current_platform.is_cpu() else nn.Linear
        config = synthesis_of(vllm_config.additional_config)
        projection = HalfLinear if config.precision == "bfloat16" else plain
        self.dit = DiffusionTransformer(dit_config, config.guidance_scale, projection)
        record = CudaGraphs() if records(vllm_config.additional_config) else None
        self.vocoder = Vocoder(bigvgan_config, fused=record is not None).float()
        work = SolverWork.of(vllm_config.model_config.hf_config, config)
        conditioner = Conditioner(self.dit, speakers, config)
        together = not current_platform.is_cpu()
        self.synthesize_with(
            SolverSynthesizer(
                self.dit, self.vocoder, conditioner, work, together, record, compiled=record is not None
            )
        )

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Whether vLLM's loader may leave out a file that has nothing but such tensors."""
        return is_of_another("token2wav", name)


def token2wav_config(config: Any) -> Any:
    """Token2wav's part of a whole model's configuration; none if it is of another family."""
    narrowed = getattr(config, "token2wav_config", config)
    return narrowed if isinstance(narrowed, Qwen2_5OmniToken2WavConfig) else None


TOKEN2WAV: Final = SynthesisFamily(
    model=Token2WavForSynthesis,
    config=token2wav_config,
    work=SolverWork.of,
    voices=lambda directory: list(load_speakers(directory)),
)
