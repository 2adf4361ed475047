"""The configuration of chunks' synthesis, and what one costs in solver steps and pieces of audio."""

from dataclasses import dataclass

from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
    Qwen2_5OmniToken2WavConfig,
)

from omnirelay.errors import CheckpointError
from services.families.qwen2_5_omni.token2wav.vocoder import samples_per_frame
from services.token2wav.chunks import CodecGeometry
from services.token2wav.family import Cost
from services.token2wav.synthesis import SynthesisChunk
from shared.config import SynthesisConfig


def component_configs(config: object) -> tuple[Qwen2_5OmniDiTConfig, Qwen2_5OmniBigVGANConfig]:
    """Configurations of transformer and vocoder; raises CheckpointError if they do not fit each other."""
    if not isinstance(config, Qwen2_5OmniToken2WavConfig):
        raise CheckpointError(f"expected a token2wav configuration, got {type(config).__name__}")
    dit, bigvgan = config.dit_config, config.bigvgan_config
    if not isinstance(dit, Qwen2_5OmniDiTConfig) or not isinstance(bigvgan, Qwen2_5OmniBigVGANConfig):
        raise CheckpointError("token2wav_config: dit_config or bigvgan_config is missing")
    if dit.mel_dim != bigvgan.mel_dim:
        raise CheckpointError(
            f"token2wav_config: dit_config.mel_dim is {dit.mel_dim}, bigvgan_config.mel_dim {bigvgan.mel_dim}"
        )
    return dit, bigvgan


def geometry_of(config: Qwen2_5OmniDiTConfig, vocoder: Qwen2_5OmniBigVGANConfig) -> CodecGeometry:
    """How codec ids, mel frames, attention blocks and samples relate."""
    return CodecGeometry(
        block_size=config.block_size,
        repeats=config.repeats,
        max_frames=config.max_position_embeddings,
        unit_samples=samples_per_frame(vocoder),
        # The table has a row more than num_embeds says (reference: DiTCodecEmbedding).
        ids=config.num_embeds + 1,
    )


@dataclass(frozen=True)
class SolverWork:
    """See :class:`services.token2wav.family.Work`.

    A chunk takes solver steps, the last of which makes the first piece of audio, and then further pieces.
    """

    geometry: CodecGeometry
    config: SynthesisConfig

    @property
    def steps(self) -> int:
        """Solver steps of a chunk."""
        return self.config.time_points - 1

    def advances(self, chunk: SynthesisChunk) -> int:
        """Its solver steps, the last of which makes audio, and further pieces of audio."""
        return self.steps - 1 + self.pieces(chunk)

    def cost(self, chunk: SynthesisChunk, done: int) -> Cost:
        """The whole window for a solver step, and a piece of the target for audio."""
        solved = self.geometry.window_frames(chunk.codes) if done < self.steps else 0
        if done < self.steps - 1 or chunk.silent:
            return Cost(solved, 0)
        return Cost(solved, -(-chunk.target_frames // self.pieces(chunk)))

    def pieces(self, chunk: SynthesisChunk) -> int:
        """In how many pieces a chunk becomes audio."""
        return 1 if chunk.silent else -(-chunk.target_frames // self.config.max_vocoder_frames)
