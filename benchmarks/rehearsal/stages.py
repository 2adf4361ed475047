"""``python -m benchmarks.rehearsal.stages STAGE MODEL WORK`` runs one stage of OmniRelay in this process.

Its output goes to a file in WORK, from which the next stage and transformers read it.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.measure.machine import peak_memory
from benchmarks.rehearsal.results import SEED, SPEAKER, StageRun, output_of
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

PROMPT_TOKENS: Final = 24
TEXT_TOKENS: Final = 8
CODEC_TOKENS: Final = 50
"""A second of speech."""
ENGINE: Final[dict[str, Any]] = {"max_model_len": 512, "kv_cache_memory_bytes": 64 * 2**20}
CONFIGS: Final[dict[StageName, StageConfig]] = {
    "thinker": ThinkerConfig(http=None, engine=ThinkerEngineConfig(**ENGINE)),
    "talker": TalkerConfig(http=None, engine=EngineConfig(**ENGINE)),
    "token2wav": Token2WavConfig(http=None),
}
NAME: Final = "rehearsal"


class Collector:
    """Takes the place of the queues to the gateway and to the next stage, and keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def put(self, message: Any) -> int:
        """Keep a message."""
        self.sent.append(message)
        return 1

    def stalls(self, _: str) -> bool:
        """Keep up with everything."""
        return False

    def of(self, kind: type[Any]) -> list[Any]:
        """What was sent of one kind, in its order."""
        return [message for message in self.sent if isinstance(message, kind)]


def speech() -> SpeechSettings:
    """A second of speech, greedy, in one piece."""
    sampling = Sampling(max_tokens=CODEC_TOKENS, min_tokens=CODEC_TOKENS)
    return SpeechSettings(speaker=SPEAKER, sampling=sampling, seed=SEED, streaming=False)


def prompt_of(vocabulary: int) -> list[int]:
    """Token ids from all over the ordinary vocabulary."""
    return [(7919 * (index + 1)) % vocabulary for index in range(PROMPT_TOKENS)]


def main(stage: StageName, model: Path, work: Path) -> StageRun:
    """Run a stage, with what the one before it has left."""
    prepare(stage)
    from safetensors.torch import save_file  # noqa: PLC0415 - the environment comes before it

    started = time.perf_counter()
    service, sent = service_of(stage, model)
    loaded = time.perf_counter()
    ask(stage, service, model, work, NAME)
    while service.active_requests():
        if failures := service.step():
            raise next(iter(failures.values()))
    done = time.perf_counter()
    save_file(result_of(stage, sent), output_of(work, stage))
    return StageRun(
        stage=stage,
        program="omnirelay",
        load_s=loaded - started,
        run_s=done - loaded,
        peak_gib=peak_memory(os.getpid()) / 2**30,
        gpu_gib=gpu_peak(),
    )


def gpu_peak() -> float | None:
    """Most that this process's PyTorch has had of a GPU, in GiB; none on a CPU."""
    import torch  # noqa: PLC0415 - the environment comes before it

    return torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_initialized() else None


def prepare(stage: StageName) -> None:
    """Prepare this process for a stage, before it loads torch."""
    from shared.vllm.environment import prepare_environment  # noqa: PLC0415 - it imports torch at its end

    # vLLM's and transformers' remarks about our choices.
    logging.basicConfig(level=logging.ERROR)
    # The stages run one after the other: each has the machine to itself.
    prepare_environment(CONFIGS[stage], stages=1)


def service_of(stage: StageName, model: Path) -> tuple[Any, Collector]:
    """Make a stage's service, and what collects all that it sends."""
    sent: Any = Collector()
    return _service(stage, model, sent), sent


def ask(stage: StageName, service: Any, model: Path, work: Path, name: str) -> None:
    """Send a stage a request of this name, with what the stage before has left in ``work``."""
    _MAKERS[stage][0](service, model, work, name)


def result_of(stage: StageName, sent: Collector) -> dict[str, Any]:
    """What a stage made for one request, as tensors."""
    return _MAKERS[stage][1](sent)


def _service(stage: StageName, model: Path, sent: Any) -> Any:
    from services.families.known import family_of, read_config  # noqa: PLC0415 - after the environment

    family, config = family_of(read_config(model)), CONFIGS[stage]
    if isinstance(config, ThinkerConfig):
        from services.thinker.service import ThinkerService  # noqa: PLC0415 - as above

        return ThinkerService(family.thinker(), model, config, sent, sent)
    if isinstance(config, TalkerConfig):
        from services.talker.service import TalkerService  # noqa: PLC0415 - as above

        return TalkerService(family.talker(), model, config, sent, sent)
    if isinstance(config, Token2WavConfig):
        from services.token2wav.service import Token2WavService  # noqa: PLC0415 - as above

        return Token2WavService(family.token2wav(), model, config, sent)
    raise TypeError(stage)


def _ask_thinker(service: Any, model: Path, _: Path, name: str) -> None:
    from checkpoint import RECIPE_FILE  # noqa: PLC0415 - loads torch

    recipe = msgspec.json.decode((model / RECIPE_FILE).read_bytes())
    prompt = prompt_of(recipe["shape"]["vocabulary"]["ids"]["end_of_text"])
    sampling = TextSampling(max_tokens=TEXT_TOKENS, min_tokens=TEXT_TOKENS)
    service.accept(
        ThinkRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=SEED,
            priority=0,
            speech=speech(),
            media=[],
        )
    )


def _made_by_thinker(sent: Collector) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - after the environment

    from shared.vllm.tensors import unpack_positions, unpack_rows  # noqa: PLC0415 - as above

    tracks: list[ConditioningRows] = sent.of(ConditioningRows)
    texts: list[TextDelta] = sent.of(TextDelta)
    return {
        "tokens": torch.tensor([token for text in texts for token in text.token_ids]),
        "rows": torch.cat([unpack_rows(each.rows) for each in tracks]),
        "positions": torch.cat(
            [unpack_positions(each.additional, each.rows.shape[0]) for each in tracks], dim=1
        ),
    }


def _ask_talker(service: Any, _: Path, work: Path, name: str) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415 - after the environment

    from shared.vllm.tensors import pack_positions, pack_rows  # noqa: PLC0415 - as above

    given = load_file(output_of(work, "thinker"))
    service.accept(SpeechStart(request_id=name, prompt_tokens=PROMPT_TOKENS, priority=0, speech=speech()))
    service.accept(
        ConditioningRows(
            request_id=name,
            seq=0,
            start=0,
            rows=pack_rows(given["rows"]),
            additional=pack_positions(given["positions"]),
            last=True,
        )
    )


def _made_by_talker(sent: Collector) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - after the environment

    deltas: list[CodecDelta] = sent.of(CodecDelta)
    return {"codes": torch.tensor([code for delta in deltas for code in delta.token_ids])}


def _ask_token2wav(service: Any, _: Path, work: Path, name: str) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415 - after the environment

    codes = load_file(output_of(work, "talker"))["codes"].tolist()
    service.accept(SynthesisStart(request_id=name, priority=0, speech=speech()))
    service.accept(CodecTokens(request_id=name, seq=0, token_ids=codes, last=True))


def _made_by_token2wav(sent: Collector) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - after the environment

    chunks: list[AudioChunk] = sent.of(AudioChunk)
    data = b"".join(bytes(chunk.data.view) for chunk in chunks)
    return {"samples": torch.frombuffer(bytearray(data), dtype=torch.float32)}


_Ask = Callable[[Any, Path, Path, str], None]
_MAKERS: Final[dict[StageName, tuple[_Ask, Callable[[Collector], dict[str, Any]]]]] = {
    "thinker": (_ask_thinker, _made_by_thinker),
    "talker": (_ask_talker, _made_by_talker),
    "token2wav": (_ask_token2wav, _made_by_token2wav),
}


if __name__ == "__main__":
    ran = main(msgspec.convert(sys.argv[1], StageName), Path(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.write(msgspec.json.encode(ran).decode() + "\n")
    sys.stdout.flush()
    # As a stage does: nothing depends on taking torch and vLLM down piece by piece.
    os._exit(0)
