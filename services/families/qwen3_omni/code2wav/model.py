"""Code2wav of Qwen3-Omni as a vLLM pooling model."""

from typing import Any

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from omnirelay.errors import CheckpointError
from services.families.qwen3_omni.code2wav.synthesizer import PieceSynthesizer, PieceWork
from services.families.qwen3_omni.code2wav.vocoder import StreamedCode2Wav
from services.families.qwen3_omni.codec import frame_samples, trimmed_samples
from services.token2wav.chunks import CodecGeometry
from services.token2wav.model import SynthesisModel
from services.token2wav.scheduler import synthesis_of

WHOLE = "code2wav"
"""Where the nominal configuration of the engine, which vLLM reads, keeps the real one."""


def geometry_of(config: Any) -> CodecGeometry:
    """How codec ids and samples relate: a frame is a unit and a block; the first one is cut short."""
    whole: Qwen3OmniMoeCode2WavConfig = getattr(config, WHOLE)
    return CodecGeometry(
        block_size=1,
        repeats=1,
        max_frames=whole.max_position_embeddings,
        unit_samples=frame_samples(whole),
        trimmed_samples=trimmed_samples(whole),
        groups=whole.num_quantizers,
        ids=whole.codebook_size,
    )


class Code2WavForSynthesis(SynthesisModel):
    """The vocoder, in float32 as the other families'."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"thinker.": None, "talker.": None, "code2wav.": "vocoder.code2wav."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        if not isinstance(getattr(config, WHOLE, None), Qwen3OmniMoeCode2WavConfig):
            raise CheckpointError(f"expected a code2wav configuration, got {type(config).__name__}")
        self.vocoder = StreamedCode2Wav(getattr(config, WHOLE)).float()
        work = PieceWork(geometry_of(config), synthesis_of(vllm_config.additional_config))
        self.synthesize_with(PieceSynthesizer(self.vocoder, work, not current_platform.is_cpu()))
