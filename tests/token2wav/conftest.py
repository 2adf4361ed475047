"""Engines of token2wav, and the reference models with the same weights."""

from collections.abc import Iterator

import pytest

from services.families.qwen2_5_omni.token2wav.model import TOKEN2WAV
from services.families.qwen2_5_omni.token2wav.synthesizer import SolverSynthesizer
from services.token2wav.engine import SynthesisEngine, build_token2wav
from services.token2wav.model import SynthesisPooler
from tests.token2wav.support import (
    MAX_BATCH_FRAMES,
    MAX_VOCODER_FRAMES,
    OTHER_BIGVGAN,
    OTHER_DIT,
    SMALL_BIGVGAN,
    SMALL_DIT,
    Oracle,
    config_of,
    make_checkpoint,
    pooler_of,
)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory) -> Oracle:
    return make_checkpoint(tmp_path_factory.mktemp("small"), SMALL_DIT, SMALL_BIGVGAN, seed=1)


@pytest.fixture(scope="session")
def other_oracle(tmp_path_factory) -> Oracle:
    return make_checkpoint(tmp_path_factory.mktemp("other"), OTHER_DIT, OTHER_BIGVGAN, seed=2)


@pytest.fixture(scope="session")
def engine(oracle) -> SynthesisEngine:
    return build_token2wav(TOKEN2WAV, oracle.path, config_of(MAX_BATCH_FRAMES, MAX_VOCODER_FRAMES))


@pytest.fixture(scope="session")
def other_engine(other_oracle) -> SynthesisEngine:
    return build_token2wav(TOKEN2WAV, other_oracle.path, config_of(100_000, 7))


@pytest.fixture
def idle(engine) -> Iterator[SynthesisEngine]:
    """The engine, with nothing left over in it before and after a test."""
    yield engine
    engine.abort(list(engine._in_flight))
    while engine.has_work:
        engine.step()


@pytest.fixture
def pooler(idle) -> SynthesisPooler:
    return pooler_of(idle)


@pytest.fixture
def synthesizer(pooler) -> SolverSynthesizer:
    return pooler.synthesizer
