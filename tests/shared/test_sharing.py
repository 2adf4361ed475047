"""How the stages divide the memory of one GPU."""

import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from vllm.third_party import pynvml

from omnirelay.errors import ConfigError
from services.families.family import Paged
from services.families.memory import (
    Model,
    longest,
    measures,
    need_of,
    placed,
    position_bytes,
    read_model,
    require_divisible,
    require_one_dtype,
    share_of,
)
from services.families.qwen2_5_omni import QWEN2_5_OMNI
from services.families.qwen3_omni import QWEN3_OMNI
from shared.config import Config, load_config
from shared.devices import Gpu
from shared.messages import STAGES, StageName
from shared.model_files import Weights
from shared.sharing import USABLE, Need, divide, stages_on
from shared.vllm import gpus as gpus_module
from shared.vllm.gpus import loading
from tests.support.children import ROOT

GIB = 2**30
SEVEN = Model(
    dtype="bfloat16",
    weights=Weights(
        22 * 10**9, {"thinker": 8_930_000_000, "talker": 1_350_000_000, "token2wav": 450_000_000}
    ),
    paged={"thinker": Paged(32_768, 32_256, 3584), "talker": Paged(32_768, 15_872, 3584)},
    synthesis=QWEN2_5_OMNI.synthesis,
)


def _released(layers: int, hidden: int, heads: int, shared: int, inner: int, experts: int) -> dict[str, int]:
    return {
        "max_position_embeddings": 65_536,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": 128,
        "moe_intermediate_size": inner,
        "num_experts_per_tok": experts,
    }


QWEN3 = Model(
    dtype="bfloat16",
    weights=Weights(
        71 * 10**9, {"thinker": 31_500_000_000, "talker": 3_350_000_000, "token2wav": 216_016_577}
    ),
    paged=QWEN3_OMNI.paged(
        {
            "thinker_config": {
                "text_config": _released(48, 2048, 32, 4, 768, 8),
                "vision_config": {"hidden_size": 1152, "intermediate_size": 4304},
            },
            "talker_config": {"text_config": _released(20, 1024, 16, 2, 384, 6)},
        }
    ),
    synthesis=QWEN3_OMNI.synthesis,
)


THREE = Model(
    dtype="bfloat16",
    weights=Weights(11 * 10**9, {"thinker": 4_703_464_448, "talker": 384_604_928, "token2wav": 449_051_264}),
    paged={"thinker": Paged(32_768, 20_480, 2048), "talker": Paged(32_768, 8_192, 2048)},
    synthesis=QWEN2_5_OMNI.synthesis,
)


def gpu(gib: float, uuid: str = "GPU-a") -> Gpu:
    return Gpu(name="Stand-in", total_bytes=int(gib * GIB), uuid=uuid)


def configured(**stages: Any) -> Config:
    return Config.model_validate({"share_gpus": True, "stages": stages})


@pytest.mark.parametrize(
    ("model", "gib", "positions"),
    [
        (THREE, 24, 32_800),
        (SEVEN, 24, None),
        (SEVEN, 40, 43_000),
        (SEVEN, 80, 440_000),
        (SEVEN, 141, 1_050_000),
    ],
)
def test_released_sizes_on_cards_as_composed(model: Model, gib: int, positions: int | None) -> None:
    composed = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text(encoding="utf-8"))["x-environment"]
    config = load_config(environment={name: str(each) for name, each in composed.items() if "__" in name})
    needed = [need_of(config, model, stage, gpu(gib)) for stage in STAGES]
    with pytest.raises(ConfigError, match="lower stages") if positions is None else nullcontext():
        shares = divide(gpu(gib), needed)
        for stage in model.paged:
            assert (shares[stage].kv_bytes or 0) // position_bytes(config, model, stage) >= (positions or 0)


needs = st.lists(
    st.builds(
        Need,
        stage=st.just("thinker"),
        processes=st.integers(1, 3),
        fixed=st.integers(0, 20 * GIB),
        position=st.integers(0, 70_000),
        longest=st.integers(1, 40_000),
        most=st.integers(40_000, 600_000),
    ),
    min_size=1,
    max_size=3,
)


@given(st.integers(GIB, 200 * GIB), needs)
def test_shares_never_exceed_the_gpu_and_hold_the_longest_request(total: int, found: list[Need]):
    whole = Gpu(name="Stand-in", total_bytes=total)
    named = [
        Need(stage, need.processes, need.fixed, need.position, need.longest, need.most)
        for stage, need in zip(STAGES, found, strict=False)
    ]
    try:
        shares = divide(whole, named)
    except ConfigError:
        assert sum(n.processes * (n.fixed + n.position * n.longest) for n in named) > int(USABLE * total)
        return
    assert sum(need.processes * shares[need.stage].nbytes for need in named) <= USABLE * total
    for need in named:
        share = shares[need.stage]
        assert share.nbytes == need.fixed + (share.kv_bytes or 0)
        if need.position:
            assert share.kv_bytes is not None
            assert need.longest * need.position <= share.kv_bytes <= need.most * need.position


@pytest.mark.parametrize(("mode", "total"), [(1, 20), (0, 80), (None, 80)], ids=["sliced", "whole", "unable"])
def test_a_slice_is_divided_and_not_its_card(monkeypatch: pytest.MonkeyPatch, mode: int | None, total: int):
    def mig_mode(handle: int) -> tuple[int, int]:
        assert handle == 3
        if mode is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return mode, mode

    platform = SimpleNamespace(
        is_cpu=lambda: False,
        device_count=lambda: 1,
        device_id_to_physical_device_id=lambda _: 3,
        get_device_total_memory=lambda _: 80 * GIB,
        get_device_name=lambda _: "Stand-in",
        get_device_uuid=lambda _: "GPU-a",
    )
    monkeypatch.setattr(gpus_module, "current_platform", platform)
    monkeypatch.setattr(gpus_module, "require_platform", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", mig_mode)
    slices = SimpleNamespace(total_memory=20 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: slices)
    assert [each.total_bytes for each in gpus_module.visible_gpus()] == [total * GIB]


def test_caches_have_as_many_positions_each():
    config = configured()
    shares = {stage: share_of(config, stage, SEVEN, [gpu(80)]) for stage in STAGES}
    counts = {}
    for stage in ("thinker", "talker"):
        share = shares[stage]
        assert share is not None
        assert share.kv_bytes is not None
        counts[stage] = share.kv_bytes // position_bytes(config, SEVEN, stage)
        assert counts[stage] > longest(config, SEVEN, stage)
    assert counts["thinker"] == counts["talker"]
    assert shares["token2wav"] is not None
    assert shares["token2wav"].kv_bytes is None


def test_a_gpu_that_is_too_small_is_refused_with_the_sum():
    with pytest.raises(ConfigError, match=r"has 24.0 GiB.*may use 21.6.*they need .*thinker .*max_model_len"):
        share_of(configured(), "talker", SEVEN, [gpu(24)])


def test_which_gpus_the_released_qwen3_omni_fits_on():
    with pytest.raises(ConfigError, match=r"they need .*thinker 68\.4, talker 8\.7, token2wav 3\.0"):
        share_of(configured(), "thinker", QWEN3, [gpu(80)])
    apart = configured(talker={"devices": 1}, token2wav={"devices": 1})
    assert share_of(apart, "thinker", QWEN3, [gpu(80)]) is None
    for config, stages, gib in ((apart, STAGES[1:], 80), (configured(), STAGES, 141)):
        shares = [share_of(config, stage, QWEN3, [gpu(gib)]) for stage in stages]
        assert sum(share.nbytes for share in shares if share is not None) <= USABLE * gib * GIB
        assert None not in shares
    # A quantised thinker leaves room on one card.
    packed = {"thinker": 31_500_000_000}
    halved = replace(QWEN3, weights=Weights(0, {**QWEN3.weights.elements, "thinker": 0}, packed))
    assert share_of(configured(), "thinker", halved, [gpu(80)]) is not None


def test_a_stage_alone_gets_no_share():
    apart = {stage: {"devices": index} for index, stage in enumerate(STAGES)}
    assert share_of(configured(**apart), "thinker", SEVEN, [gpu(24)]) is None
    # Two replicas of it are not alone.
    apart["thinker"]["replicas"] = 2
    assert share_of(configured(**apart), "thinker", SEVEN, [gpu(80)]) is not None
    own = {"engine": {"gpu_memory_utilization": 0.5}}
    assert share_of(configured(thinker=own), "thinker", SEVEN, [gpu(80)]) is None
    other = share_of(configured(thinker=own), "talker", SEVEN, [gpu(80)])
    assert other is not None
    assert other.nbytes < 0.4 * 80 * GIB


def test_a_configured_cache_is_kept():
    config = configured(thinker={"engine": {"kv_cache_memory_bytes": 4 * GIB}})
    share = share_of(config, "thinker", SEVEN, [gpu(80)])
    assert share is not None
    assert share.kv_bytes is None
    assert share.nbytes > 4 * GIB


def test_a_quantised_cache_takes_half_but_for_its_rows():
    plain = configured()
    quantised = configured(thinker={"engine": {"kv_cache_dtype": "fp8"}})
    rows = 3584 * 2
    whole = position_bytes(plain, SEVEN, "thinker")
    assert position_bytes(quantised, SEVEN, "thinker") == (whole - rows) // 2 + rows


def test_stages_are_found_by_their_devices():
    config = configured(
        thinker={"devices": "1,0", "engine": {"tensor_parallel_size": 2}}, talker={"devices": 0}
    )
    assert stages_on(config, "0", 2, None) == ["thinker", "talker", "token2wav"]
    assert stages_on(config, "1", 2, None) == ["thinker"]
    assert stages_on(config, "1", 2, "1") == ["thinker", "token2wav"]


def test_a_stage_is_placed_before_it_loads(tiny_checkpoint: Path, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpus_module, "visible_gpus", lambda: [gpu(139)])
    config = configured()
    with placed(config, "talker", config.stages.talker, tiny_checkpoint) as talker:
        engine = talker.engine
        share = share_of(config, "talker", read_model(tiny_checkpoint), [gpu(139)])
        assert share is not None
        assert engine.kv_cache_memory_bytes == share.kv_bytes
        assert engine.gpu_memory_utilization == pytest.approx(share.nbytes / (139 * GIB))
    monkeypatch.setattr(gpus_module, "visible_gpus", lambda: [gpu(2)])
    with pytest.raises(ConfigError, match="they need"):
        placed(config, "talker", config.stages.talker, tiny_checkpoint).__enter__()
    # Who shares is known to `omnirelay up` and in Compose; a process by itself has its GPU to itself.
    alone = Config()
    with placed(alone, "talker", alone.stages.talker, tiny_checkpoint) as talker:
        assert talker is alone.stages.talker


def test_unequal_dtypes_are_refused_before_anything_is_loaded(tiny_checkpoint: Path):
    values: dict[str, Any] = {"stages": {"thinker": {"engine": {"dtype": "bfloat16"}}}}
    config = Config.model_validate(values)
    told = "thinker computes in bfloat16, the talker in float32.*stages.talker.engine.dtype"
    with pytest.raises(ConfigError, match=told):
        placed(config, "talker", config.stages.talker, tiny_checkpoint).__enter__()
    values["text_only"] = True
    alone = Config.model_validate(values)
    with placed(alone, "thinker", alone.stages.thinker, tiny_checkpoint) as thinker:
        assert thinker is alone.stages.thinker
    same = configured(thinker={"engine": {"dtype": "float32"}})
    require_one_dtype(same, "float32")


@pytest.mark.parametrize("measures", [(True, False), (False, True), (False, False)])
def test_an_engine_that_measures_a_gpu_loads_alone(monkeypatch, tmp_path: Path, measures):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    order: list[str] = []
    waits = threading.Event()
    monkeypatch.setattr(gpus_module.log, "info", lambda *_: waits.set())

    def second() -> None:
        with loading([gpu(80)], measures[1]):
            order.append("second")

    thread = threading.Thread(target=second)
    with loading([gpu(80)], measures[0]), loading([gpu(80, "GPU-b")], measures[0]):
        thread.start()
        if any(measures):
            assert waits.wait(60)
        else:
            thread.join(60)
        order.append("first")
    thread.join(60)
    assert order == (["first", "second"] if any(measures) else ["second", "first"])


def test_a_stage_measures_unless_its_cache_is_given():
    config = configured(thinker={"engine": {"kv_cache_memory_bytes": 2**20}})
    measured = {name: measures(config.stage(name)) for name in STAGES}
    assert measured == {"thinker": False, "talker": True, "token2wav": False}


@pytest.mark.parametrize(
    ("stage", "workers", "told"),
    [
        ("thinker", 3, r"thinker\.engine\.tensor_parallel_size is 3.*heads are 4; .*audio.*; .*image"),
        ("talker", 3, r"stages\.talker\.engine\.tensor_parallel_size is 3.*key-value heads are 2"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused_before_anything_is_loaded(
    stage: StageName, workers: int, told: str, tiny_checkpoint: Path
):
    config = configured(**{stage: {"engine": {"tensor_parallel_size": workers}}})
    with pytest.raises(ConfigError, match=told):
        placed(config, stage, config.stage(stage), tiny_checkpoint).__enter__()


@pytest.mark.parametrize(("workers", "divides"), [(1, True), (2, True), (7, False), (14, True), (4, False)])
def test_key_value_heads_are_divided_or_shared(workers: int, divides: bool):
    # The released 3B talker's heads.
    paged = Paged(32_768, 0, 0, {"attention heads": 14}, 2)
    config = configured(talker={"engine": {"tensor_parallel_size": workers}})
    with nullcontext() if divides else pytest.raises(ConfigError, match="does not divide"):
        require_divisible(config, "talker", paged)
