"""Engines of token2wav, and the reference models with the same weights."""

from collections.abc import Iterator

import pytest

from services.families.qwen2_5_omni.token2wav.family import TOKEN2WAV
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
    make_checkpoint,
)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory) -> Oracle:
    return make_checkpoint(tmp_path_factory.mktemp("small"), SMALL_DIT, SMALL_BIGVGAN, seed=1)


@pytest.fixture(scope="session")
def other_oracle(tmp_path_factory) -> Oracle:
    return make_checkpoint(tmp_path_factory.mktemp("other"), OTHER_DIT, OTHER_BIGVGAN, seed=2)


@pytest.fixture(scope="session")
def engine(oracle) -> SynthesisEngine:
    return build_token2wav(
        TOKEN2WAV,
        oracle.path,
        max_batch_frames=MAX_BATCH_FRAMES,
        max_vocoder_frames=MAX_VOCODER_FRAMES,
        max_num_seqs=8,
    )


@pytest.fixture(scope="session")
def other_engine(other_oracle) -> SynthesisEngine:
    return build_token2wav(
        TOKEN2WAV, other_oracle.path, max_batch_frames=100_000, max_vocoder_frames=7, max_num_seqs=8
    )


@pytest.fixture
def idle(engine) -> Iterator[SynthesisEngine]:
    """The engine, with nothing left over in it before and after a test."""
    yield engine
    engine.abort(list(engine._internal_ids))
    while engine.has_work:
        engine.step()


@pytest.fixture
def pooler(idle) -> SynthesisPooler:
    return idle._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model.pooler


@pytest.fixture
def synthesizer(pooler) -> SolverSynthesizer:
    return pooler.synthesizer
