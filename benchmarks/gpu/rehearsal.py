"""A request through OmniRelay's stages: ``python -m benchmarks.gpu.rehearsal STAGE MODEL WORK``.

Each stage computes it alone, and once more beside seven others.  Its output goes to a file in WORK, from
which the next stage and transformers read it.  vLLM checks meanwhile that the inputs of CUDA graphs are where
they were captured, and tells where the host waits.
"""

import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.measure.machine import peak_memory
from benchmarks.measure.process import answer
from benchmarks.measure.stage import Sink, finish, service_of
from shared.config import (
    EngineConfig,
    StageConfig,
    TalkerConfig,
    ThinkerConfig,
    ThinkerEngineConfig,
    Token2WavConfig,
)
from shared.messages import (
    AudioChunk,
    CodecDelta,
    CodecTokens,
    ConditioningRows,
    Sampling,
    SpeechSettings,
    SpeechStart,
    StageName,
    SynthesisStart,
    TextDelta,
    TextSampling,
    ThinkRequest,
)

SPEAKER, SEED, PROMPT_TOKENS, TEXT_TOKENS = "Ethan", 11, 24, 8
AT_ONCE: Final = {"alone": 1, "of eight": 8}
"""Requests that are computed at once, the compared one first."""
CODEC_TOKENS: Final = 50
"""A second of speech."""
ENGINE: Final[dict[str, Any]] = {"max_model_len": 512, "kv_cache_memory_bytes": 64 * 2**20}
CONFIGS: Final[dict[StageName, StageConfig]] = {
    "thinker": ThinkerConfig(http=None, engine=ThinkerEngineConfig(**ENGINE)),
    "talker": TalkerConfig(http=None, engine=EngineConfig(**ENGINE)),
    "token2wav": Token2WavConfig(http=None),
}
SPEECH: Final = SpeechSettings(
    speaker=SPEAKER,
    sampling=Sampling(max_tokens=CODEC_TOKENS, min_tokens=CODEC_TOKENS),
    seed=SEED,
    streaming=False,
)


class StageRun(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, loaded and run in a process of its own.

    Attributes:
        stage: Which.
        program: ``omnirelay`` or ``transformers``.
        load_s: Seconds to load it, libraries apart.
        run_s: Seconds for its answer.
        peak_gib: Largest resident set of the process, pages of files that were mapped included.
        gpu_gib: Most that it took of a GPU; none on a CPU.
        waits: Where the host waited for the GPU within steps, and how often, by vLLM's check.
    """

    stage: StageName
    program: str
    load_s: float
    run_s: float
    peak_gib: float
    gpu_gib: float | None = None
    waits: dict[str, int] = {}


def check_steps() -> Counter[str]:
    """Switch on vLLM's checks, before it is imported; gives where the host waits, as it is found."""
    # At the level of debugging, CUDA graphs compare addresses.
    os.environ |= {"VLLM_GPU_SYNC_CHECK": "warn", "VLLM_LOGGING_LEVEL": "DEBUG"}
    waits: Counter[str] = Counter()

    def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        if "sync detected" in str(message) or "synchronizing CUDA operation" in str(message):
            waits[f"{'/'.join(Path(filename).parts[-3:])}:{lineno}"] += 1
        else:
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    warnings.showwarning = note  # type: ignore[assignment]  # called by position
    return waits


def finished(stage: StageName, program: str, started: float, loaded: float) -> StageRun:
    """Return the figures of a run that has just ended in this process."""
    import torch  # noqa: PLC0415 - the environment comes before it

    gpu = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_initialized() else None
    return StageRun(
        stage=stage,
        program=program,
        load_s=loaded - started,
        run_s=time.perf_counter() - loaded,
        peak_gib=peak_memory(os.getpid()) / 2**30,
        gpu_gib=gpu,
    )


def output_of(work: Path, stage: StageName, kind: str = "alone") -> Path:
    """The file with what a stage of OmniRelay made; ``kind`` is of :data:`AT_ONCE`."""
    return work / f"{stage} {kind}.safetensors"


def prompt_of(vocabulary: int, number: int = 0) -> list[int]:
    """Token ids from all over the ordinary vocabulary; each number gives others."""
    return [(7919 * (index + 1) + 31 * number) % vocabulary for index in range(PROMPT_TOKENS)]


def main(stage: StageName, model: Path, work: Path) -> StageRun:
    """Run a stage, with what the one before it has left."""
    started, waits = time.perf_counter(), check_steps()
    service, sink = service_of(stage, model, CONFIGS[stage], stages=1)
    loaded = time.perf_counter()
    for kind, count in AT_ONCE.items():
        for number in range(count):
            ask(stage, service, model, work, f"{number} {kind}", number)
        finish(service)
        keep_output(stage, sink, work, f"0 {kind}", kind)
    return msgspec.structs.replace(finished(stage, "omnirelay", started, loaded), waits=dict(waits))


def ask(stage: StageName, service: Any, model: Path, work: Path, name: str, number: int = 0) -> None:
    """Send a stage a request of this name, with what the stage before has left in ``work``.

    Each number gives another prompt, other codes, or draws otherwise.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 - the environment comes before it

    from shared.vllm.tensors import pack_positions, pack_rows  # noqa: PLC0415 - as above

    if stage == "thinker":
        from checkpoint import RECIPE_FILE  # noqa: PLC0415 - loads torch

        recipe = msgspec.json.decode((model / RECIPE_FILE).read_bytes())
        service.accept(
            ThinkRequest(
                request_id=name,
                prompt_token_ids=prompt_of(recipe["shape"]["vocabulary"]["ids"]["end_of_text"], number),
                sampling=TextSampling(max_tokens=TEXT_TOKENS, min_tokens=TEXT_TOKENS),
                seed=SEED,
                priority=0,
                speech=SPEECH,
                media=[],
            )
        )
    elif stage == "talker":
        given = load_file(output_of(work, "thinker"))
        rows, positions = pack_rows(given["rows"]), pack_positions(given["positions"])
        speech = msgspec.structs.replace(SPEECH, seed=SEED + number)
        service.accept(SpeechStart(request_id=name, prompt_tokens=PROMPT_TOKENS, priority=0, speech=speech))
        service.accept(
            ConditioningRows(request_id=name, seq=0, start=0, rows=rows, additional=positions, last=True)
        )
    else:
        codes = load_file(output_of(work, "talker"))["codes"].roll(number).tolist()
        service.accept(SynthesisStart(request_id=name, priority=0, speech=SPEECH))
        service.accept(CodecTokens(request_id=name, seq=0, token_ids=codes, last=True))


def keep_output(stage: StageName, sink: Sink, work: Path, name: str, kind: str = "alone") -> None:
    """Write what a stage made for the request of this name, as tensors."""
    import torch  # noqa: PLC0415 - the environment comes before it
    from safetensors.torch import save_file  # noqa: PLC0415 - as above

    from shared.vllm.tensors import unpack_positions, unpack_rows  # noqa: PLC0415 - as above

    def sent(message: type[Any]) -> list[Any]:
        return [each for each in sink.of(message) if each.request_id == name]

    if stage == "thinker":
        tracks = sent(ConditioningRows)
        places = [unpack_positions(each.additional, each.rows.shape[0]) for each in tracks]
        tokens = [token for text in sent(TextDelta) for token in text.token_ids]
        rows = torch.cat([unpack_rows(each.rows) for each in tracks])
        found = {"tokens": torch.tensor(tokens), "rows": rows, "positions": torch.cat(places, dim=1)}
    elif stage == "talker":
        codes = [code for delta in sent(CodecDelta) for code in delta.token_ids]
        found = {"codes": torch.tensor(codes)}
    else:
        data = b"".join(bytes(chunk.data.view) for chunk in sent(AudioChunk))
        found = {"samples": torch.frombuffer(bytearray(data), dtype=torch.float32)}
    save_file(found, output_of(work, stage, kind))


if __name__ == "__main__":
    answer(main(msgspec.convert(sys.argv[1], StageName), Path(sys.argv[2]), Path(sys.argv[3])))
