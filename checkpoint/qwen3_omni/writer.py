"""Writes a random Qwen3-Omni checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from checkpoint import tokenizer
from checkpoint.config import write_generation, write_preprocessors
from checkpoint.initialize import fill, generator_for
from checkpoint.language import parameters_of
from checkpoint.qwen3_omni.config import model_config
from checkpoint.qwen3_omni.shape import TINY, Qwen3Shape
from checkpoint.writer import complete_directory, step, write_recipe
from shared.vllm.torchvision_compat import declare_missing_operators

TOKENS: Final = tokenizer.NamedTokens(
    image="<|image_pad|>",
    audio="<|audio_pad|>",
    video="<|video_pad|>",
    vision_bos="<|vision_start|>",
    vision_eos="<|vision_end|>",
    audio_bos="<|audio_start|>",
    audio_eos="<|audio_end|>",
)
_PROCESSOR: Final = "Qwen3OmniMoeProcessor"
_BRANCH: Final = 0.3
"""What residual branches of the vocoder are damped by: undamped, rounding grows from layer to layer."""
_VOICE_GAIN: Final = 8.0
"""So that voices differ in what they say, too."""
_LOUDNESS: Final = 0.2
"""Standard deviation of samples, few of which are cut at 1."""


def write_qwen3_omni(directory: Path, shape: Qwen3Shape = TINY, seed: int = 0) -> None:
    """As :func:`checkpoint.writer.write_checkpoint`; its replies are not legible, and end by chance alone."""
    declare_missing_operators()
    with complete_directory(directory) as partial:
        with step("tokenizer"):
            trained = tokenizer.build_tokenizer(shape.trained, shape.special_ids)
            longest = shape.text["max_position_embeddings"]
            tokenizer.write_tokenizer(partial, trained, longest, TOKENS, _PROCESSOR, system=None)
        config = model_config(shape, tokenizer.role_ids(trained))
        with step("layers"), torch.random.fork_rng(devices=[]):
            model = transformers.Qwen3OmniMoeForConditionalGeneration(config).eval()
        for name in ("thinker", "talker", "code2wav") if shape.speaks else ("thinker",):
            part = getattr(model, name)
            with step(f"{name}, {parameters_of(part) / 1e6:.1f} million parameters"):
                fill(part, generator_for(seed, name))
        if shape.speaks:
            with torch.no_grad():
                voices = list(config.talker_config.speaker_id.values())
                model.talker.get_input_embeddings().weight[voices] *= _VOICE_GAIN
            _soften(model.code2wav, shape, generator_for(seed, "loudness"))
        with step("files"):
            model.save_pretrained(partial)
            half = [0.5] * 3
            pictures = {"image_mean": half, "image_std": half, "patch_size": 16}
            write_preprocessors(partial, _PROCESSOR, pictures, shape.pixels, shape.longest_seconds)
            write_generation(partial, shape.special_ids)
            write_recipe(partial, asdict(shape), seed)


@torch.no_grad()
def _soften(code2wav: Any, shape: Qwen3Shape, generator: torch.Generator) -> None:
    """Let code2wav sound as loud as speech, and rounding stay small in it."""
    for unit in code2wav.decoder.modules():
        if hasattr(unit, "conv2"):
            unit.conv2.conv.weight.mul_(_BRANCH)
    last, heard = code2wav.decoder[-1].conv, list[torch.Tensor]()
    hook = last.register_forward_hook(lambda *arguments: heard.append(arguments[-1]))
    code2wav(torch.randint(shape.codes, (1, shape.groups, 24), generator=generator))
    hook.remove()
    for parameter in last.parameters():
        parameter.mul_(_LOUDNESS / heard[0].std())
