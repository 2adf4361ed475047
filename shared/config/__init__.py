"""The configuration that every process of the stack reads: schema (``stack``) and loader (``loading``)."""

from shared.config.cluster import ProcessPlace
from shared.config.gateway import GatewayAddresses, GatewayConfig, TlsConfig
from shared.config.loading import (
    ENV_PREFIX,
    MODEL_VARIABLE,
    NOT_YAML,
    check_values,
    holds_nothing,
    is_ours,
    load_config,
    read_values,
    tell_ignored,
)
from shared.config.media import MediaConfig
from shared.config.stack import DEFAULT_CHECKPOINT, Config, TracingConfig
from shared.config.stages import (
    EngineConfig,
    Precision,
    StageConfig,
    SynthesisConfig,
    SynthesisEngineConfig,
    TalkerConfig,
    ThinkerConfig,
    ThinkerEngineConfig,
    Token2WavConfig,
)
