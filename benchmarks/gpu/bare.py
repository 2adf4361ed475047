"""The models without a server: OmniRelay's DiT and vocoder beside transformers'.

The only part that needs no vLLM.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import transformers

from benchmarks.gpu.reference import WAVEFORM_LIMIT, load_token2wav, sound_of
from benchmarks.gpu.rehearsal import SEED, SPEAKER
from benchmarks.gpu.results import PartResult, Settings
from benchmarks.measure.results import Cell, Table
from services.families.qwen2_5_omni.token2wav.conditioning import Conditioner
from services.families.qwen2_5_omni.token2wav.dit import DiffusionTransformer, HalfLinear, Projection
from services.families.qwen2_5_omni.token2wav.synthesizer import SolverSynthesizer, SolverWork
from services.families.qwen2_5_omni.token2wav.vocoder import Vocoder
from services.families.qwen2_5_omni.voices import load_speakers
from services.token2wav.chunks import SynthesisChunk
from shared.config import Precision, SynthesisConfig
from shared.vllm.platform import set_float32_precision
from shared.vllm.recorded import CudaGraphs

CODES: Final = 50
"""A second of speech."""
REPEATS: Final = 3
_DIT, _VOCODER = "code2wav_dit_model.", "code2wav_bigvgan_model."


@torch.inference_mode()
def main(settings: Settings) -> PartResult:
    """Compare and time both."""
    device, model = torch.device(settings.device), Path(settings.model)
    config = transformers.Qwen2_5OmniConfig.from_pretrained(model)
    table, problems = _synthesis(config.token2wav_config, model, device)
    return PartResult(tables=[table], problems=problems)


def _synthesis(config: Any, model: Path, device: torch.device) -> tuple[Table, list[str]]:
    """DiT and vocoder make a second of speech."""
    theirs = load_token2wav(config, model).eval()
    tensors = theirs.state_dict()
    theirs = theirs.to(device)
    codes = torch.randint(
        config.dit_config.num_embeds, (CODES,), generator=torch.Generator().manual_seed(SEED)
    )

    def make(synthesizer: SolverSynthesizer) -> torch.Tensor:
        # A stream of its own each time: a chunk goes on from what the one before it has left.
        return synthesize(
            synthesizer,
            SynthesisChunk(
                codes=tuple(codes.tolist()),
                start=0,
                target_end=CODES * config.dit_config.repeats,
                seed=SEED,
                speaker=SPEAKER,
                is_last=True,
            ),
        )

    speaker = load_speakers(model)[SPEAKER]
    rows: list[list[Cell]] = []
    problems: list[str] = []
    exact: list[float] = []
    set_float32_precision("exact")
    reference, reference_ms = timed(lambda: sound_of(theirs, config, codes, speaker), device)
    # On a CPU there is no TF32, and nothing is compiled.
    precisions: tuple[Precision, ...] = (
        ("exact", "bfloat16") if device.type == "cpu" else ("exact", "fast", "bfloat16")
    )
    for precision, compiled in product(precisions, (False, True) if device.type == "cuda" else (False,)):
        set_float32_precision(precision)
        projection = HalfLinear if precision == "bfloat16" else torch.nn.Linear
        # One for each: graphs repeat what was computed in the precision in which they were made.
        synthesizer = synthesizer_of(config, model, tensors, device, projection, compiled)
        ours, ours_ms = timed(partial(make, synthesizer), device)
        difference = float((ours.cpu() - reference.cpu()).abs().max())
        rows.append([precision, "yes" if compiled else "no", difference, ours_ms, reference_ms])
        exact += [difference] if precision == "exact" else []
        if device.type == "cuda" and not synthesizer.records:
            problems.append(f"no CUDA graph of a step of the DiT could be made in {precision}")
    table = Table(
        title=f"DiT and vocoder, {CODES} codec tokens; how far samples are from transformers' exact ones",
        columns=["precision", "compiled", "largest difference", "OmniRelay, ms", "transformers, ms"],
        rows=rows,
    )
    # NaN is no more than anything.
    if not all(each <= WAVEFORM_LIMIT for each in exact):
        problems.append(f"DiT and vocoder differ from transformers' by {exact}")
    return table, problems


def synthesizer_of(
    config: Any,
    model: Path,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    projection: Projection = torch.nn.Linear,
    compiled: bool = False,
) -> SolverSynthesizer:
    """OmniRelay's DiT and vocoder with the reference's weights, on a GPU ``compiled`` or not."""
    defaults = SynthesisConfig()
    dit = DiffusionTransformer(config.dit_config, defaults.guidance_scale, projection)
    vocoder = Vocoder(config.bigvgan_config, fused=compiled).float()
    for module, prefix in ((dit, _DIT), (vocoder.bigvgan, _VOCODER)):
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        # Buffers are computed when the modules are made; parameters must all be there.
        parameters = {name: own[name] for name, _ in module.named_parameters()}
        module.load_state_dict(parameters, strict=False)
        module.eval().to(device)
    work = SolverWork.of(config, defaults)
    # As the stage does: docs/gpu.md.
    record = CudaGraphs() if device.type == "cuda" else None
    conditioner = Conditioner(dit, load_speakers(model), defaults)
    return SolverSynthesizer(dit, vocoder, conditioner, work, record is not None, record, compiled)


def synthesize(synthesizer: SolverSynthesizer, chunk: SynthesisChunk) -> torch.Tensor:
    """Make a chunk audio, in one go."""
    state = synthesizer.prepare(chunk)
    synthesizer.advance([state], [range(SynthesisConfig().time_points - 1)])
    waveform = synthesizer.finished(state)
    if waveform is None:
        raise RuntimeError("one piece of audio was due")
    return waveform


def timed(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    """Run something; gives what it gave, and the median of its milliseconds after a warm-up."""
    took = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        result = run()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        took.append(1000 * (time.perf_counter() - started))
    return result, median(took[1:])
