"""The doctor on limits that do not fit each other or the checkpoint."""

import dataclasses
from typing import Any

import pytest

from ops.doctor import limits, machine
from ops.doctor.finding import Finding
from services.families.family import Paged
from services.families.qwen2_5_omni.files import SYNTHESIS
from services.families.sizes import Model
from shared.config import Config
from shared.model_files import Weights

TINY = Model(
    dtype="float32",
    weights=Weights(17_000_000, {"thinker": 1_100_000, "talker": 2_100_000, "token2wav": 1_100_000}),
    paged={"thinker": Paged(8192, 384), "talker": Paged(8192, 384)},
    synthesis=SYNTHESIS,
)
LARGE = Model(
    dtype="bfloat16",
    weights=Weights(22 * 10**9, {"thinker": 9 * 10**9, "talker": 10**9, "token2wav": 4 * 10**8}),
    paged={"thinker": Paged(32_768, 32_256), "talker": Paged(32_768, 28_160)},
    synthesis=SYNTHESIS,
)


def configured(**sections: Any) -> Config:
    return Config.model_validate(sections)


def engine(stage: str, **values: Any) -> dict[str, Any]:
    return {"stages": {stage: {"engine": values}}}


@pytest.mark.parametrize(
    ("sections", "level", "told"),
    [
        ({}, "ok", "fit each other"),
        ({"gateway": {"heartbeat_timeout_s": 0.9}}, "problem", "every 0.5 s, and counts as gone after 0.9 s"),
        ({"stages": {"talker": {"heartbeat_s": 6.0}}}, "problem", "the talker gives a sign every 6 s"),
        (
            engine("token2wav", max_num_seqs=4) | {"gateway": {"limits": {"max_active": 16}}},
            "warning",
            "admits 16 requests, the token2wav computes 4",
        ),
        (engine("token2wav", max_num_seqs=4), "ok", "fit each other"),
        (engine("thinker", max_num_batched_tokens=8), "problem", "a step of the thinker has 8 tokens for 16"),
        ({"media": {"max_request_bytes": 100 * 2**20}}, "warning", "no room for its text"),
    ],
)
def test_limits(sections: dict[str, Any], level: str, told: str) -> None:
    first = next(limits.check_limits(configured(**sections), on_cpu=True))
    assert first.level == level
    assert told in first.what
    assert bool(first.advice) == (level != "ok")


def cache(model: Model, on_cpu: bool = True, **sections: Any) -> list[Finding]:
    return list(limits.check_cache(configured(**sections), model, on_cpu))


def test_a_cache_that_holds_the_longest_request() -> None:
    thinker, talker = cache(TINY)
    assert thinker.level == talker.level == "ok"
    # As vLLM itself counts: 256 MiB in blocks of 32 positions of 1,536 bytes.
    assert "holds 174,752 positions; one request has at most 8,192" in thinker.what


def test_a_released_checkpoint_with_the_defaults_of_a_cpu() -> None:
    thinker, talker = cache(LARGE)
    assert thinker.level == talker.level == "problem"
    assert "of 256 MiB holds 4,160 positions, a request may have 32,768" in thinker.what
    enough = 32_768 * 32_256 * 2
    assert f"kv_cache_memory_bytes to {enough} or more, or max_model_len to 4160 or less" in thinker.advice
    for change in ({"kv_cache_memory_bytes": enough}, {"max_model_len": 4160}):
        assert cache(LARGE, **engine("thinker", **change))[0].level == "ok"


def test_on_a_gpu_vllm_measures() -> None:
    assert cache(LARGE, on_cpu=False) == []
    (finding,) = cache(LARGE, on_cpu=False, **engine("talker", kv_cache_memory_bytes=2**20))
    assert finding.level == "problem"


def test_more_positions_than_the_checkpoint_has() -> None:
    thinker, _ = cache(TINY, **engine("thinker", max_model_len=9000))
    assert thinker.level == "problem"
    assert "max_model_len is 9000, the checkpoint has 8192" in thinker.what


def test_what_the_stages_need() -> None:
    base, mib = machine.STAGE_BYTES, 2**20
    assert machine.memory_needed(Config(), TINY) == {
        "thinker": base + 256 * mib + 4 * 1_100_000,
        "talker": base + 256 * mib + 4 * 2_100_000,
        "token2wav": base + 4 * 1_100_000,
    }
    changed = configured(**engine("thinker", dtype="float32", kv_cache_memory_bytes=mib))
    needed = machine.memory_needed(changed, LARGE)
    assert needed["thinker"] == base + mib + 4 * 9 * 10**9
    assert needed["talker"] == base + 256 * mib + 2 * 10**9
    assert needed["token2wav"] == base + 4 * 4 * 10**8


def test_the_blocks_are_those_of_the_configuration() -> None:
    small = {"kv_cache_memory_bytes": 1000 * 1536, "max_model_len": 900}
    (default, _), (set_, _) = (
        cache(TINY, **engine("thinker", **small, **more)) for more in ({}, {"block_size": 128})
    )
    assert (default.level, set_.level) == ("ok", "problem")
    assert "holds 992 positions" in default.what
    assert "holds 896 positions" in set_.what


def test_a_model_that_cannot_be_divided_so() -> None:
    divided = Paged(8192, 384, 0, {"attention heads": 4}, 2)
    model = dataclasses.replace(TINY, paged={"thinker": divided, "talker": divided})
    thinker, talker = cache(model, **engine("thinker", tensor_parallel_size=3))
    assert (thinker.level, talker.level) == ("problem", "ok")
    assert "thinker.engine.tensor_parallel_size is 3, which does not divide the model" in thinker.what
    assert "attention heads are 4" in thinker.what
