"""The model's config and the processors' configs, from a shape."""

from pathlib import Path
from typing import Any

import transformers

from checkpoint.shape import CheckpointShape
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
    text, audio, vision = shape.thinker, shape.audio, shape.vision
    return {
        **_media_ids(shape),
        **_ends(shape),
        **_CLOCK,
        "vision_token_id": shape.vocabulary.ids.vision_pad,
        "user_token_id": user_token,
        "text_config": {
            **_ends(shape),
            "vocab_size": shape.vocabulary.size,
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.key_value_heads,
            "max_position_embeddings": text.max_positions,
            "rope_parameters": _rope(text.head_dim),
            "tie_word_embeddings": False,
        },
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": audio.layers,
            "encoder_attention_heads": audio.heads,
            "encoder_ffn_dim": audio.intermediate_size,
            "d_model": audio.hidden_size,
            "max_source_positions": 1500,
            "n_window": 100,
            "output_dim": text.hidden_size,
        },
        "vision_config": {
            "depth": vision.layers,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.heads,
            "in_channels": 3,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": 2,
            "window_size": 112,
            "out_hidden_size": text.hidden_size,
            "fullatt_block_indexes": list(vision.full_attention or (vision.layers - 1,)),
            "tokens_per_second": 25,
        },
    }


def _talker(shape: CheckpointShape) -> dict[str, Any]:
    talker, ids = shape.talker, shape.vocabulary.ids
    return {
        **_media_ids(shape),
        **_CLOCK,
        **CODEC_IDS,
        "tts_text_pad_token_id": ids.speech_pad,
        "tts_text_start_token_id": ids.speech_start,
        "tts_text_end_token_id": ids.speech_end,
        "vocab_size": CODEC_VOCABULARY,
        "embedding_size": shape.thinker.hidden_size,
        "hidden_size": talker.hidden_size,
        "intermediate_size": talker.intermediate_size,
        "num_hidden_layers": talker.layers,
        "num_attention_heads": talker.heads,
        "num_key_value_heads": talker.key_value_heads,
        "head_dim": talker.head_dim,
        "max_position_embeddings": talker.max_positions,
        "rope_parameters": _rope(talker.head_dim, talker.mrope_sections),
        "spatial_merge_size": _MERGE,
    }


def dit_config(shape: CheckpointShape) -> dict[str, Any]:
    """Return the config of token2wav's diffusion transformer."""
    dit = shape.dit
    channels = dit.encoder_channels
    attention = dit.encoder_attention_channels or channels // 2
    return {
        "hidden_size": dit.hidden_size,
        "num_hidden_layers": dit.layers,
        "num_attention_heads": dit.heads,
        "head_dim": dit.head_dim,
        "ff_mult": 2,
        "emb_dim": dit.embedding_size,
        "max_position_embeddings": dit.max_positions,
        "block_size": 24,
        "look_ahead_layers": list(dit.look_ahead_layers),
        "look_backward_layers": list(dit.look_backward_layers),
        "repeats": 2,
        "num_embeds": dit.codes,
        "mel_dim": MEL_BINS,
        "enc_emb_dim": dit.speaker_size,
        "enc_dim": dit.encoder_size,
        # The last layer takes the three before it side by side.
        "enc_channels": [channels, channels, channels, channels, 3 * channels],
        "enc_attention_channels": attention,
        "enc_res2net_scale": 2,
        "enc_se_channels": attention,
    }


def bigvgan_config(shape: CheckpointShape) -> dict[str, Any]:
    """Return the config of the vocoder."""
    kernels = shape.vocoder.kernel_sizes
    return {
        "mel_dim": MEL_BINS,
        "upsample_initial_channel": shape.vocoder.channels,
        "upsample_rates": list(shape.vocoder.rates),
        "upsample_kernel_sizes": list(shape.vocoder.rate_kernels),
        "resblock_kernel_sizes": list(kernels),
        "resblock_dilation_sizes": [[1, 3, 5] for _ in kernels],
    }


def write_processors(directory: Path, shape: CheckpointShape) -> None:
    """Write how sound, pictures and videos become the encoders' input, and the generation defaults."""
    pixels_of_token = (_PATCH * _MERGE) ** 2
    size = {
        "shortest_edge": shape.vision.fewest_tokens * pixels_of_token,
        "longest_edge": shape.vision.most_tokens * pixels_of_token,
    }
    vision = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "merge_size": _MERGE,
        "patch_size": _PATCH,
        "temporal_patch_size": 2,
        "min_pixels": size["shortest_edge"],
        "max_pixels": size["longest_edge"],
        "size": size,
        "processor_class": "Qwen2_5OmniProcessor",
    }
    write_preprocessors(directory, vision, shape.audio.longest_seconds)
    ends = _ends(shape)
    stops = [shape.vocabulary.ids.im_end, shape.vocabulary.ids.end_of_text]
    write_generation(directory, {**ends, "eos_token_id": stops})


def write_preprocessors(directory: Path, vision: dict[str, Any], longest_seconds: int) -> None:
    """Write how sound of at most so many seconds, pictures and videos become the encoders' input."""
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


def write_generation(directory: Path, values: dict[str, Any]) -> None:
    """Write the defaults of generation, over what transformers has written."""
    write_json(directory / "generation_config.json", values)
