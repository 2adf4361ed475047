"""The model's config and the processors' configs, from a shape."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from checkpoint.shape import CheckpointShape, head_dim
from checkpoint.tokenizer import write_json

ROPE_THETA = 1_000_000.0
CODEC_VOCABULARY = 8448
MEL_BINS = 80
# Both ends are built into transformers' generate (8292 and 8294), hence not part of a shape.
CODEC_IDS = {
    "tts_codec_pad_token_id": 8292,
    "tts_codec_start_token_id": 8293,
    "tts_codec_end_token_id": 8294,
    "tts_codec_mask_token_id": 8296,
}
_PATCH = 14
_MERGE = 2
_CLOCK = {"position_id_per_seconds": 25, "seconds_per_chunk": 2}


def model_config(
    shape: CheckpointShape, user_token: int, dtype: str = "float32"
) -> transformers.Qwen2_5OmniConfig:
    """Return the config of the whole model; every special id of the tokenizer is in it.

    ``dtype`` is what the weights are written in.
    """
    config = transformers.Qwen2_5OmniConfig(
        thinker_config=_thinker(shape, user_token),
        talker_config=_talker(shape),
        token2wav_config={"dit_config": dit_config(shape), "bigvgan_config": bigvgan_config(shape)},
    )
    config.architectures = ["Qwen2_5OmniModel"]
    # Without it vLLM would compute float32 weights in half of it.
    config.dtype = dtype
    return config


def _media_ids(shape: CheckpointShape) -> dict[str, int]:
    ids = shape.vocabulary.ids
    return {
        "audio_token_index": ids.audio,
        "image_token_index": ids.image,
        "video_token_index": ids.video,
        "audio_start_token_id": ids.audio_bos,
        "audio_end_token_id": ids.audio_eos,
        "vision_start_token_id": ids.vision_bos,
        "vision_end_token_id": ids.vision_eos,
    }


def _ends(shape: CheckpointShape) -> dict[str, int]:
    ids = shape.vocabulary.ids
    return {"bos_token_id": ids.im_start, "eos_token_id": ids.im_end, "pad_token_id": ids.end_of_text}


def _rope(head_dim: int, sections: tuple[int, int, int] | None = None) -> dict[str, Any]:
    """Return M-RoPE parameters: by default a quarter of the frequencies for time, the rest in halves."""
    pairs = head_dim // 2
    time = pairs // 4
    height = (pairs - time) // 2
    return {
        "rope_type": "default",
        "rope_theta": ROPE_THETA,
        "mrope_section": list(sections or (time, height, pairs - time - height)),
    }


def _thinker(shape: CheckpointShape, user_token: int) -> dict[str, Any]:
    width = shape.thinker["hidden_size"]
    return {
        **_media_ids(shape),
        **_ends(shape),
        **_CLOCK,
        "vision_token_id": shape.vocabulary.ids.vision_pad,
        "user_token_id": user_token,
        "text_config": {
            **_ends(shape),
            **shape.thinker,
            "vocab_size": shape.vocabulary.size,
            "rope_parameters": _rope(head_dim(shape.thinker)),
            "tie_word_embeddings": False,
        },
        "audio_config": {
            **shape.audio,
            "num_mel_bins": 128,
            "max_source_positions": 1500,
            "n_window": 100,
            "output_dim": width,
        },
        "vision_config": {
            **shape.vision,
            "in_channels": 3,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": 2,
            "window_size": 112,
            "out_hidden_size": width,
            "tokens_per_second": 25,
        },
    }


def _talker(shape: CheckpointShape) -> dict[str, Any]:
    ids = shape.vocabulary.ids
    return {
        **_media_ids(shape),
        **_CLOCK,
        **CODEC_IDS,
        "tts_text_pad_token_id": ids.speech_pad,
        "tts_text_start_token_id": ids.speech_start,
        "tts_text_end_token_id": ids.speech_end,
        "vocab_size": CODEC_VOCABULARY,
        "embedding_size": shape.thinker["hidden_size"],
        **shape.talker,
        "rope_parameters": _rope(head_dim(shape.talker), shape.talker_mrope),
        "spatial_merge_size": _MERGE,
    }


def dit_config(shape: CheckpointShape) -> dict[str, Any]:
    """Return the config of token2wav's diffusion transformer."""
    return {
        **shape.dit,
        "ff_mult": 2,
        "block_size": 24,
        "repeats": 2,
        "mel_dim": MEL_BINS,
        "enc_res2net_scale": 2,
    }


def bigvgan_config(shape: CheckpointShape) -> dict[str, Any]:
    """Return the config of the vocoder."""
    kernels = shape.vocoder["resblock_kernel_sizes"]
    return {**shape.vocoder, "mel_dim": MEL_BINS, "resblock_dilation_sizes": [[1, 3, 5] for _ in kernels]}


def write_processors(directory: Path, shape: CheckpointShape) -> None:
    """Write how sound, pictures and videos become the encoders' input, and the generation defaults."""
    pixels_of_token = (_PATCH * _MERGE) ** 2
    fewest, most = shape.picture_tokens
    pictures = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": _PATCH,
    }
    pixels = (fewest * pixels_of_token, most * pixels_of_token)
    write_preprocessors(directory, "Qwen2_5OmniProcessor", pictures, pixels, shape.longest_seconds)
    write_generation(directory, shape.vocabulary.ids.tokens())


def write_preprocessors(
    directory: Path, processor: str, pictures: dict[str, Any], pixels: tuple[int, int], longest_seconds: int
) -> None:
    """Write how sound, pictures and videos become the encoders' input.

    Args:
        directory: The checkpoint.
        processor: transformers' class for all of them.
        pictures: What the vision encoder wants, but for the size.
        pixels: The fewest and the most of a picture.
        longest_seconds: The longest sound.
    """
    fewest, most = pixels
    vision = {
        **pictures,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
        "min_pixels": fewest,
        "max_pixels": most,
        "size": {"shortest_edge": fewest, "longest_edge": most},
        "processor_class": processor,
    }
    sampling_rate, hop = 16_000, 160
    audio = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": sampling_rate,
        "hop_length": hop,
        "n_fft": 400,
        "chunk_length": longest_seconds,
        "n_samples": longest_seconds * sampling_rate,
        "nb_max_frames": longest_seconds * sampling_rate // hop,
        "dither": 0.0,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }
    image = {**vision, "image_processor_type": "Qwen2VLImageProcessor"}
    write_json(directory / "preprocessor_config.json", {**image, **audio})
    write_json(
        directory / "video_preprocessor_config.json",
        {**vision, "video_processor_type": "Qwen2VLVideoProcessor"},
    )


def write_generation(directory: Path, tokens: Mapping[str, int]) -> None:
    """Write the defaults of generation, over what transformers has written, by the ids of special tokens."""
    end = tokens["<|endoftext|>"]
    stops = [tokens["<|im_end|>"], end]
    values = {"bos_token_id": tokens["<|im_start|>"], "eos_token_id": stops, "pad_token_id": end}
    write_json(directory / "generation_config.json", values)
