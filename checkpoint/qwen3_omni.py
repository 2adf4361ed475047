"""Random checkpoints of Qwen3-Omni: sizes, the configuration in the form of the released one, weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from checkpoint import tokenizer
from checkpoint.config import write_generation, write_preprocessors
from checkpoint.shape import audio_sizes, decoder_sizes
from checkpoint.weights import fill, generator_for, parameters_of
from checkpoint.writer import complete_directory, step, write_recipe
from shared.vllm.torchvision_compat import declare_missing_operators

Values = Mapping[str, Any]
SPECIAL: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Qwen3Shape:
    """Sizes; attention on a CPU needs heads of 32 values, and a mixture of experts widths that 32 divides.

    ``codes`` are the ids of a code book; ``trained`` the byte-pair tokens, which precede the special ones;
    ``pixels`` the fewest and the most that a picture is scaled to.
    """

    text: Values
    audio: Values
    vision: Values
    talker: Values
    predictor: Values
    code2wav: Values
    codes: int = 64
    groups: int = 4
    accepted_layer: int = 2
    speaks: bool = True
    trained: int = 1536
    vocabulary: int = 1600
    longest_seconds: int = 60
    pixels: tuple[int, int] = (64 * 64, 256 * 256)

    @property
    def special_ids(self) -> dict[str, int]:
        """The id of each special token; they follow each other."""
        return {text: self.trained + place for place, text in enumerate(SPECIAL)}


TINY: Final = Qwen3Shape(
    text=decoder_sizes(64, 96, 4, 4, 2) | {"head_dim": 32, **_EXPERTS},
    audio=audio_sizes(32, 64, 2, 2) | {"downsample_hidden_size": 16},
    vision={
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    talker=decoder_sizes(64, 96, 3, 4, 2)
    | {"head_dim": 32, "shared_expert_intermediate_size": 32, **_EXPERTS},
    predictor={
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    code2wav={
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "decoder_dim": 32,
    },
)
_SOME_EXPERTS: Final = {"num_experts": 16, "num_experts_per_tok": 4}
# The relations of the released sizes, made small: frames of 16 codes, few of many experts.
SMALL: Final = Qwen3Shape(
    text=decoder_sizes(512, 1024, 8, 8, 2) | {"head_dim": 64, **_SOME_EXPERTS, "moe_intermediate_size": 512},
    audio=audio_sizes(256, 1024, 4, 4) | {"downsample_hidden_size": 64},
    vision={
        "depth": 6,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_heads": 4,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2, 4],
    },
    talker=decoder_sizes(256, 512, 6, 4, 2)
    | {"head_dim": 64, "shared_expert_intermediate_size": 256, **_SOME_EXPERTS, "moe_intermediate_size": 128},
    predictor={**TINY.predictor, "intermediate_size": 768, "num_hidden_layers": 3, "head_dim": 64},
    code2wav={
        **TINY.code2wav,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "decoder_dim": 128,
    },
    codes=2048,
    groups=16,
    accepted_layer=4,
)


SPEAKERS: Final = ("chelsie", "ethan", "aiden")
_SUPPRESSED: Final = 1024
"""So many of the largest codec ids stand for no code (transformers' ``generate``)."""
_CODEC_IDS: Final = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
_FIRST_SPEAKER: Final = 253
"""How far behind the codes the released ids are."""
_ROPE: Final = {"rope_type": "default", "rope_theta": 1_000_000.0}
_MIXTURE: Final = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}


def model_config(shape: Qwen3Shape, roles: Mapping[str, int]) -> transformers.Qwen3OmniMoeConfig:
    """The whole model's; ``roles`` are the ids of the words that begin a turn."""
    ids = shape.special_ids
    media = {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "position_id_per_seconds": 13,
        "user_token_id": roles["user"],
    }
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=_thinker(shape) | media,
        talker_config=_talker(shape) | media,
        code2wav_config={
            **shape.code2wav,
            "codebook_size": shape.codes,
            "num_quantizers": shape.groups,
            "rope_parameters": _ROPE,
        },
        enable_audio_output=shape.speaks,
        im_start_token_id=ids["<|im_start|>"],
        im_end_token_id=ids["<|im_end|>"],
        tts_pad_token_id=ids["<tts_pad>"],
        tts_bos_token_id=ids["<tts_text_bos>"],
        tts_eos_token_id=ids["<tts_text_eod>"],
        **{f"{role}_token_id": token for role, token in roles.items()},
    )
    config.dtype = "float32"
    return config


def _thinker(shape: Qwen3Shape) -> dict[str, Any]:
    width = shape.text["hidden_size"]
    return {
        "text_config": {
            **_MIXTURE,
            **shape.text,
            "vocab_size": shape.vocabulary,
            "rope_parameters": _mrope(shape.text),
            # vLLM asks for these, and below.
            "tie_word_embeddings": False,
        },
        "audio_config": {**shape.audio, "num_mel_bins": 128, "output_dim": width},
        "vision_config": {
            **shape.vision,
            "out_hidden_size": width,
            "image_size": round(shape.vision["num_position_embeddings"] ** 0.5) * 16,
            "apply_vit_abs_pos_embed": True,
        },
    }


def _talker(shape: Qwen3Shape) -> dict[str, Any]:
    vocabulary = shape.codes + _SUPPRESSED
    ids = {name: shape.codes + place for name, place in _CODEC_IDS.items()}
    first = shape.codes + _FIRST_SPEAKER
    return {
        "text_config": {
            **_MIXTURE,
            **shape.talker,
            "vocab_size": vocabulary,
            "rope_parameters": _mrope(shape.talker),
        },
        "code_predictor_config": {
            **shape.predictor,
            "hidden_size": shape.talker["hidden_size"],
            "vocab_size": shape.codes,
            "num_code_groups": shape.groups,
            "max_position_embeddings": 2 * shape.groups,
            "rope_parameters": _ROPE,
        },
        "num_code_groups": shape.groups,
        "thinker_hidden_size": shape.text["hidden_size"],
        "accept_hidden_layer": shape.accepted_layer,
        "spatial_merge_size": 2,
        "speaker_id": {name: first + place for place, name in enumerate(SPEAKERS)},
        **ids,
    }


def _mrope(sizes: Values) -> dict[str, Any]:
    """M-RoPE, interleaved: three eighths of a head's pairs for height and width each, as released."""
    pairs = sizes["head_dim"] // 2
    side = 5 * pairs // 16
    return _ROPE | {"mrope_section": [pairs - 2 * side, side, side], "mrope_interleaved": True}


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
