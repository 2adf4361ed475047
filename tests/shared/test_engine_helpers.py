"""What the stages share around their engines, as far as it needs no model."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.inspect import type_info
from vllm import SamplingParams, envs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingType
from vllm.v1.request import RequestStatus

from omnirelay.errors import (
    CheckpointError,
    InvalidRequestError,
    PromptTooLongError,
    StageFailedError,
    UnknownSpeakerError,
)
from services.families.qwen2_5_omni import QWEN2_5_OMNI
from services.families.qwen2_5_omni.voices import load_speakers
from shared.checkpoints import WEIGHT_INDEX
from shared.config import StageConfig, ThinkerConfig, Token2WavConfig
from shared.messages import STAGES, Sampling
from shared.model_files import require_model_files
from shared.vllm import environment
from shared.vllm.environment import prepare_environment
from shared.vllm.sampling.arguments import arguments_of
from shared.vllm.sampling.generation import finish_reason, sampling_params, submit
from shared.vllm.scheduling import StageScheduler


class LightScheduler(StageScheduler):
    """The stage's part of a scheduler, with vLLM's part left out."""

    def __init__(self) -> None:
        self._failures = {}
        self.finished: list[tuple[Any, RequestStatus]] = []

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        self.finished.append((request_ids, finished_status))


def raising(error: BaseException) -> Any:
    def work() -> None:
        raise error

    return work


def test_an_error_while_preparing_ends_only_its_request(caplog):
    caplog.set_level(logging.WARNING, logger="shared.vllm.scheduling")
    scheduler = LightScheduler()
    own = UnknownSpeakerError("no voice Bob")
    assert scheduler.prepare("a", raising(own)) is None
    assert scheduler.prepare("b", raising(KeyError("rows"))) is None
    assert scheduler.prepare("c", lambda: "fine") == "fine"
    assert scheduler.prepare("d", raising(VLLMValidationError("no"))) is None
    assert scheduler.finished == [(name, RequestStatus.FINISHED_ERROR) for name in ("a", "b", "d")]
    assert scheduler.has_failures
    failures = scheduler.take_failures()
    assert failures["a"] is own
    assert isinstance(failures["b"], StageFailedError)
    assert "KeyError('rows')" in str(failures["b"])
    assert scheduler.take_failures() == {}
    assert not scheduler.has_failures
    assert "request a failed: unknown_speaker" in caplog.text
    # What a client asked for is told to the client.
    assert "no voice Bob" not in caplog.text
    assert [bool(record.exc_info) for record in caplog.records] == [False, True, True]


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), AssertionError("a bug")])
def test_what_is_no_fault_of_the_request_is_not_blamed_on_it(error):
    scheduler = LightScheduler()
    with pytest.raises(type(error)):
        scheduler.prepare("a", raising(error))
    assert not scheduler.has_failures


def params(room: int = 100, **values: Any) -> SamplingParams:
    sampling = Sampling(**({"max_tokens": 10} | values))
    return sampling_params(sampling, stage="talker", seed=7, stop_token_ids=[3], room=room)


def test_sampling_reaches_the_engine_as_it_was_asked_for():
    result = params(min_tokens=2, temperature=0.9, top_k=40, repetition_penalty=1.05)
    assert (result.max_tokens, result.min_tokens) == (10, 2)
    # Draws are not vLLM's, either.
    assert result.seed is None
    assert (result.temperature, result.top_k, result.top_p) == (0.0, 0, 1.0)
    assert result.sampling_type is SamplingType.GREEDY
    assert arguments_of(result).draws == (0.9, 40, 1.0, 0.0)
    assert result.stop_token_ids == [3]
    assert result.output_kind is RequestOutputKind.DELTA
    assert result.detokenize is False
    # That of vLLM's sampler is off: a processor of ours has it.
    assert result.repetition_penalty == 1
    assert arguments_of(result).repetition == 1.05


def test_an_answer_is_never_longer_than_the_room_behind_the_prompt():
    result = params(room=4, max_tokens=10, min_tokens=8)
    assert (result.max_tokens, result.min_tokens) == (4, 4)
    assert params(max_tokens=3, min_tokens=8).min_tokens == 3
    with pytest.raises(PromptTooLongError, match="no room"):
        params(room=0)


def test_sampling_that_the_engine_refuses_is_an_invalid_request():
    with pytest.raises(InvalidRequestError, match="sampling: top_p must be"):
        params(top_p=2.0)


BOUNDED = [each for each in type_info(Sampling).fields if not each.name.endswith("_tokens")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("field", BOUNDED, ids=lambda field: field.name)
def test_the_engine_takes_all_that_messages_let_through(field: Any) -> None:
    kind = field.type
    lowest = kind.ge if kind.ge is not None else 1e-9
    for value in (lowest, kind.le):
        sampling = msgspec.convert({"max_tokens": 10, field.name: value}, Sampling)
        sampling_params(sampling, stage="thinker", seed=7, stop_token_ids=[], room=100)
    for value in (lowest - 1, kind.le + 1):
        with pytest.raises(msgspec.ValidationError, match=field.name):
            msgspec.convert({"max_tokens": 10, field.name: value}, Sampling)


@pytest.mark.parametrize(
    "error", [VLLMValidationError("token 9 is unknown"), ValueError("token 9 is unknown")]
)
def test_a_prompt_that_the_engine_refuses_is_an_invalid_request(error):
    def add_request(*_: Any, **__: Any) -> str:
        raise error

    aborted: list[list[str]] = []
    engine: Any = SimpleNamespace(add_request=add_request, abort_request=aborted.append)
    with pytest.raises(InvalidRequestError, match="token 9 is unknown"):
        submit(engine, "a", [1], params(), 0)
    assert aborted == [["a"]]


def test_only_a_request_that_ended_by_itself_has_a_finish_reason():
    def completion(reason: str | None) -> CompletionOutput:
        return CompletionOutput(0, "", [], None, None, finish_reason=reason)

    assert [finish_reason(completion(reason)) for reason in ("stop", "length")] == ["stop", "length"]
    for reason in ("abort", "error", None):
        with pytest.raises(StageFailedError, match=f"the engine ended the request: {reason}"):
            finish_reason(completion(reason))


def voice(**changes: Any) -> dict[str, Any]:
    return {"cond": torch.zeros(1, 4), "ref_mel": torch.zeros(1, 5, 3), "bos_token": 7} | changes


def test_voices_are_read_as_the_checkpoint_has_them(tmp_path):
    flat = voice(cond=torch.ones(4, dtype=torch.float16), ref_mel=torch.ones(5, 3), bos_token=torch.tensor(9))
    torch.save({"Ann": voice(), "Bob": flat}, tmp_path / "spk_dict.pt")
    voices = load_speakers(tmp_path)
    assert list(voices) == ["Ann", "Bob"]
    bob = voices["Bob"]
    assert (bob.cond.shape, bob.cond.dtype, bob.ref_mel.shape) == ((1, 4), torch.float32, (1, 5, 3))
    assert (voices["Ann"].bos_token, bob.bos_token) == (7, 9)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "at least one voice"),
        ([voice()], "expected a dictionary"),
        ({"Ann": 3}, "voice 'Ann' is int"),
        ({"Ann": voice(cond=None)}, "Ann.cond is missing"),
        ({"Ann": voice(cond=torch.zeros(1, 4, dtype=torch.int32))}, "Ann.cond is missing or not"),
        ({"Ann": voice(cond=torch.zeros(2, 4))}, "Ann.cond has shape"),
        ({"Ann": voice(cond=torch.full((1, 4), torch.nan))}, "not finite"),
        ({"Ann": voice(ref_mel=torch.zeros(1, 0, 3))}, "Ann.ref_mel has shape"),
        ({"Ann": voice(bos_token=-1)}, "bos_token is missing or not a token id"),
        ({"Ann": voice(bos_token=True)}, "bos_token is missing or not a token id"),
        ({"Ann": voice(bos_token=torch.tensor([1.5]))}, "bos_token is missing or not a token id"),
    ],
)
def test_a_voice_that_cannot_be_used_is_named(tmp_path, content, problem):
    torch.save(content, tmp_path / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_speakers(tmp_path)
    assert "spk_dict.pt" in str(caught.value)


class Harmful:
    """Unpickled, it would make a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_a_speaker_file_that_is_missing_broken_or_harmful_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is missing"):
        load_speakers(tmp_path)
    file = tmp_path / "spk_dict.pt"
    for data in (b"", b"not a file of tensors", bytes(100), b"PK\x03\x04 and no more", b"\x80\x02."):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="not a file of plain tensors"):
            load_speakers(tmp_path)
    target = tmp_path / "made"
    torch.save({"Ann": Harmful(str(target))}, file)
    with pytest.raises(CheckpointError, match="not a file of plain tensors"):
        load_speakers(tmp_path)
    assert not target.exists()


def test_every_file_that_a_checkpoint_lacks_is_named(tmp_path, tiny_checkpoint):
    require_model_files(tiny_checkpoint, QWEN2_5_OMNI.files, QWEN2_5_OMNI.check_files)
    with pytest.raises(
        CheckpointError, match=r"lacks config\.json, preprocessor_config\.json, spk_dict\.pt, \*\."
    ):
        require_model_files(tmp_path, QWEN2_5_OMNI.files, QWEN2_5_OMNI.check_files)
    for path in tiny_checkpoint.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    require_model_files(tmp_path, QWEN2_5_OMNI.files, QWEN2_5_OMNI.check_files)
    index = tmp_path / WEIGHT_INDEX
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lacks b\.safetensors$"):
        require_model_files(tmp_path, QWEN2_5_OMNI.files, QWEN2_5_OMNI.check_files)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"x": []}}',
        '{"weight_map": {"x": "../a"}}',
        "\\xff",
    ],
)
def test_an_index_of_weights_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / WEIGHT_INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        require_model_files(tmp_path, QWEN2_5_OMNI.files, QWEN2_5_OMNI.check_files)


Prepared = Callable[..., dict[str, str]]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Prepares an environment as that of a stage's process, and returns it."""
    vllm_log = logging.getLogger("vllm")
    monkeypatch.setattr(vllm_log, "level", vllm_log.level)

    def prepare(config: StageConfig | None = None, **environment: str) -> dict[str, str]:
        monkeypatch.setattr(os, "environ", {"PATH": os.defpath} | environment)
        prepare_environment(config or ThinkerConfig())
        return dict(os.environ)

    return prepare


def test_the_environment_is_prepared_as_configured(prepared: Prepared) -> None:
    config = ThinkerConfig(threads=3, devices="1,2")
    result = prepared(config, OMP_NUM_THREADS="5", VLLM_LOGGING_LEVEL="DEBUG")
    assert logging.getLogger("vllm").level == logging.DEBUG
    assert result["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert result["OMP_NUM_THREADS"] == "3"
    assert result["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert result["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert result["HF_HUB_OFFLINE"] == "1"


def test_kernels_that_nobody_can_compile_are_not_chosen(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch(0o755)
    lacking = prepared(CUDA_HOME=str(tmp_path / "other"))
    having = prepared(CUDA_HOME=str(tmp_path))
    assert lacking["VLLM_USE_FLASHINFER_SAMPLER"] == having["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert lacking["VLLM_USE_DEEP_GEMM"] == "0"
    assert "VLLM_USE_DEEP_GEMM" not in having
    chosen = prepared(VLLM_USE_DEEP_GEMM="1", CUDA_HOME=str(tmp_path / "other"))
    assert chosen["VLLM_USE_DEEP_GEMM"] == "1"
    # vLLM's own reading of them.
    known = ("VLLM_USE_FLASHINFER_SAMPLER", *environment._COMPILED_WITH_NVCC)
    assert all(name in envs.environment_variables for name in known)


def test_a_vocoder_has_room_for_its_compiled_convolutions(prepared: Prepared) -> None:
    # With as little as the others, which must not grow with every new length, it compiles them all each time.
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    assert prepared()[name] == "64"
    assert prepared(Token2WavConfig())[name] == "512"


def test_without_a_number_of_threads_the_stages_share_the_cores(prepared: Prepared) -> None:
    result = prepared()
    assert result["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // len(STAGES)))
    assert "CUDA_VISIBLE_DEVICES" not in result
    assert prepared(OMP_NUM_THREADS="5")["OMP_NUM_THREADS"] == "5"
