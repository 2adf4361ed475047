"""vLLM's CUDA build on a machine without a card: it is imported, and chooses as a start on an H100 would."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure.stage import DEFAULTS
from shared.config import TalkerConfig, ThinkerConfig
from shared.engine_defaults import batch_size
from shared.messages import STAGES, StageName

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]

# Of the driver's library: what vLLM's own libraries are linked to.  Each call of it would fail.
NAMES = """cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString
cuGetProcAddress_v2 cuInit cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity
cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library that stands for the driver's."""
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "driver.c"
    source.write_text("\n".join(f"int {name}(void) {{ return 100; }}" for name in NAMES.split()) + "\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_a_start_chooses_for_a_card_what_runs_without_nvcc(
    stage: StageName, tiny_checkpoint: Path, driver: Path
) -> None:
    assert torch.version.cuda, "this is not the CUDA build: make test-cuda"
    found = start(stage, tiny_checkpoint, driver)
    assert found["sampler"] == "forward_native"
    assert found["compiler"] == "vllm.compilation.backends"
    assert found["eager"] is (stage == "token2wav")
    if stage == "token2wav":
        return
    assert found["attention"] == "FLASH_ATTN"
    assert (found["decoding"], found["mixed"]) == ("FULL", "PIECEWISE")
    config = DEFAULTS[stage]
    assert isinstance(config, ThinkerConfig | TalkerConfig)
    requests = batch_size(config.engine, False)
    assert found["max_num_seqs"] == requests
    assert max(found["capture_sizes"]) >= requests


def start(stage: StageName, model: Path, driver: Path) -> dict[str, Any]:
    """What :mod:`tests.cuda.start` prints."""
    command = [sys.executable, "-m", "tests.cuda.start", stage, str(model)]
    # Without devices to be seen vLLM keeps Triton, whose driver it cannot ask.
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
