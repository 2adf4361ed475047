"""The parts of a checkpoint's configuration that token2wav reads."""

from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
    Qwen2_5OmniToken2WavConfig,
)

from omnirelay.errors import CheckpointError


def component_configs(config: object) -> tuple[Qwen2_5OmniDiTConfig, Qwen2_5OmniBigVGANConfig]:
    """Return the configurations of the transformer and of the vocoder.

    Raises :class:`CheckpointError` if this is none of token2wav, or its parts do not fit each other.
    """
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
