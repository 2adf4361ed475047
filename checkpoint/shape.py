"""What a checkpoint is made of: the sizes of its parts and the ids of its special tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from omnirelay.errors import CheckpointError

Values = dict[str, Any]
SPEAKERS = ("Chelsie", "Ethan")
# vLLM's attention on the CPU has no kernel for smaller heads.
SMALLEST_HEAD = 32


@dataclass(frozen=True)
class SpecialIds:
    """The id of every special token of the text vocabulary; each is an id of the tokenizer too."""

    end_of_text: int
    im_start: int
    im_end: int
    audio: int
    audio_bos: int
    audio_eos: int
    vision_bos: int
    vision_eos: int
    vision_pad: int
    image: int
    video: int
    speech_pad: int
    speech_start: int
    speech_end: int
    chelsie: int
    ethan: int

    @classmethod
    def compact(cls, first: int) -> SpecialIds:
        """Return ids that follow each other from ``first`` on."""
        return cls(*range(first, first + len(fields(cls))))

    def tokens(self) -> dict[str, int]:
        """Return the id of each special token by its text, smallest id first."""
        pairs = {_TEXTS.get(name, f"<|{name}|>"): each for name, each in asdict(self).items()}
        return dict(sorted(pairs.items(), key=lambda pair: pair[1]))

    def speakers(self) -> dict[str, int]:
        """Return the id that starts the speech of each voice, by the voice's name."""
        return dict(zip(SPEAKERS, (self.chelsie, self.ethan), strict=True))


_TEXTS = {
    "end_of_text": "<|endoftext|>",
    "audio": "<|AUDIO|>",
    "image": "<|IMAGE|>",
    "video": "<|VIDEO|>",
    "chelsie": "<|voice_chelsie|>",
    "ethan": "<|voice_ethan|>",
}
"""The texts of tokens that are not called as their fields are."""


@dataclass(frozen=True)
class VocabularyShape:
    """The text vocabulary: ``trained`` byte-pair tokens, fillers up to the first special id, specials.

    ``size`` is the number of rows of the thinker's embedding, at least one more than the largest id.
    """

    trained: int = 1536
    size: int = 1600
    ids: SpecialIds = field(default_factory=lambda: SpecialIds.compact(1536))


# In the order of the fields.
_RELEASED_IDS = (*range(151643, 151649), *range(151652, 151657), 151859, 151860, 151861, 151872, 151873)
RELEASED_VOCABULARY = VocabularyShape(size=152064, ids=SpecialIds(*_RELEASED_IDS))


@dataclass(frozen=True)
class CheckpointShape:
    """Sizes of a whole checkpoint, part by part, by the names that transformers' configurations have.

    The thinker's heads have ``hidden_size / num_attention_heads`` values.  ``talker_mrope`` are pairs of
    rotated values for time, height and width; None for a quarter, and the rest in halves, as the thinker has
    them.  Recordings are cut at ``longest_seconds`` (25 tokens a second), a picture is scaled to fewest to
    most ``picture_tokens`` of 28x28 pixels, a voice's recording has ``reference_frames``.
    """

    thinker: Values
    talker: Values
    audio: Values
    vision: Values
    dit: Values
    vocoder: Values
    vocabulary: VocabularyShape = field(default_factory=VocabularyShape)
    talker_mrope: tuple[int, int, int] | None = None
    longest_seconds: int = 60
    picture_tokens: tuple[int, int] = (4, 256)
    reference_frames: int = 200

    def validate(self) -> None:
        """Raise :class:`CheckpointError` for sizes of which no working checkpoint can be made."""
        for name, part in (("thinker", self.thinker), ("talker", self.talker)):
            size, heads = head_dim(part), part["num_attention_heads"]
            _require(size >= SMALLEST_HEAD, f"{name}.head_dim is {size}; use 32 or more")
            _require(
                heads % part["num_key_value_heads"] == 0,
                f"{name}.num_attention_heads must be k x num_key_value_heads",
            )
        whole = self.thinker["hidden_size"] % self.thinker["num_attention_heads"] == 0
        _require(whole, "thinker.hidden_size must be k x num_attention_heads")
        ids = list(self.vocabulary.ids.tokens().values())
        _require(len(set(ids)) == len(ids), "vocabulary.ids names one id twice")
        _require(ids[0] >= self.vocabulary.trained, "vocabulary.ids overlaps the trained tokens")
        _require(ids[-1] < self.vocabulary.size, "vocabulary.size is too small for vocabulary.ids")
        _require(self.vocabulary.ids.end_of_text == ids[0], "vocabulary.ids must start with end_of_text")
        for layer in (*self.dit["look_ahead_layers"], *self.dit["look_backward_layers"]):
            _require(layer < self.dit["num_hidden_layers"], f"the DiT has no layer {layer}")


def head_dim(part: Values) -> int:
    """Values of one attention head."""
    return int(part.get("head_dim") or part["hidden_size"] // part["num_attention_heads"])


def speaker_encoder(size: int, channels: int, attention: int | None = None) -> Values:
    """Sizes of the DiT's speaker encoder; attention and squeeze-excitation have half of its channels."""
    # The last layer takes the three before it side by side.
    layers = [channels, channels, channels, channels, 3 * channels]
    inner = dict.fromkeys(("enc_attention_channels", "enc_se_channels"), attention or channels // 2)
    return {"enc_dim": size, "enc_channels": layers, **inner}


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise CheckpointError(f"the shape cannot be built: {problem}")


def decoder_sizes(
    width: int, inner: int, layers: int, heads: int, key_value_heads: int, positions: int = 8192
) -> Values:
    """A decoder's sizes."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "max_position_embeddings": positions,
    }


def audio_sizes(width: int, inner: int, layers: int, heads: int) -> Values:
    """The audio encoder's sizes."""
    return {
        "d_model": width,
        "encoder_ffn_dim": inner,
        "encoder_layers": layers,
        "encoder_attention_heads": heads,
    }


def vision_sizes(width: int, inner: int, layers: int, heads: int) -> Values:
    """The sizes of the encoder of pictures; its last layer sees all of a picture, others see windows."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "depth": layers,
        "num_heads": heads,
        "fullatt_block_indexes": [layers - 1],
    }


def dit_sizes(
    width: int, layers: int, heads: int, codes: int, voices: Values, voice: int, ahead: int, behind: int
) -> Values:
    """The sizes of the DiT: codec ids have ``codes`` values, the voice's recording ``voice``.

    The layer ``ahead`` sees a block that follows, the first layer and ``behind`` one that went before.
    """
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": width // heads,
        "emb_dim": codes,
        "look_ahead_layers": [ahead],
        "look_backward_layers": [0, behind],
        "num_embeds": 8193,
        "max_position_embeddings": 32768,
        "enc_emb_dim": voice,
        **voices,
    }


TINY = CheckpointShape(
    thinker=decoder_sizes(128, 256, 2, 4, 2),
    talker=decoder_sizes(96, 192, 2, 4, 2) | {"head_dim": 32},
    audio=audio_sizes(64, 128, 2, 4),
    vision=vision_sizes(64, 128, 2, 4),
    dit=dit_sizes(64, 4, 4, 32, speaker_encoder(16, 32), voice=32, ahead=1, behind=2),
    vocoder={
        "upsample_initial_channel": 128,
        "resblock_kernel_sizes": [3, 7],
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
    },
)
# Speaks faster than real time on two cores; each stage takes 20 to 50% of transformers' time.
SMALL = CheckpointShape(
    thinker=decoder_sizes(1024, 4096, 10, 16, 4),
    talker=decoder_sizes(512, 1536, 6, 8, 2) | {"head_dim": 64},
    audio=audio_sizes(256, 1024, 4, 4),
    vision=vision_sizes(256, 1024, 4, 4),
    dit=dit_sizes(128, 3, 2, 128, speaker_encoder(64, 64), voice=64, ahead=1, behind=2),
    vocoder={**TINY.vocoder, "upsample_initial_channel": 64, "resblock_kernel_sizes": [3]},
)
# Half of the layers of the released thinker of 3B parameters, and a talker with the sizes of Qwen2 0.5B: each
# step takes tens of milliseconds, each stage 20 to 50% of transformers' time for an answer of 10 s.
BENCH = CheckpointShape(
    thinker=decoder_sizes(2048, 11008, 18, 16, 2, positions=4096),
    talker=decoder_sizes(896, 4864, 24, 14, 2, positions=4096) | {"head_dim": 64},
    audio=SMALL.audio,
    vision=SMALL.vision,
    dit={**SMALL.dit, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "emb_dim": 512},
    vocoder=SMALL.vocoder,
)
# The shapes of Qwen2.5-Omni-3B as released, by the configuration of it that InternLM's XTuner has
# (Qwen2_5Omni3BConfig); what that leaves out (DiT, vocoder) is what transformers has by default.
RELEASED_3B = CheckpointShape(
    vocabulary=replace(RELEASED_VOCABULARY, size=151936),
    thinker=decoder_sizes(2048, 11008, 36, 16, 2, positions=32768),
    talker=decoder_sizes(896, 4864, 24, 14, 2, positions=32768) | {"head_dim": 64},
    talker_mrope=(16, 16, 0),
    audio=audio_sizes(1280, 5120, 32, 20),
    longest_seconds=300,
    vision={**vision_sizes(1280, 3420, 32, 16), "fullatt_block_indexes": [7, 15, 23, 31]},
    picture_tokens=(4, 16384),
    dit=dit_sizes(1024, 22, 16, 512, speaker_encoder(128, 256, 64), voice=192, ahead=10, behind=20),
    vocoder={**TINY.vocoder, "upsample_initial_channel": 1536, "resblock_kernel_sizes": [3, 7, 11]},
)
# The sizes of the checkpoint that `labs.training` makes: answers, and fits into a repository.
SPEAKING = CheckpointShape(
    thinker=decoder_sizes(192, 512, 4, 3, 3),
    talker=decoder_sizes(256, 768, 4, 4, 2) | {"head_dim": 64},
    audio=audio_sizes(192, 512, 4, 3),
    longest_seconds=30,
    vision=vision_sizes(128, 384, 4, 4),
    picture_tokens=(36, 36),
    dit={
        **dit_sizes(160, 6, 5, 128, speaker_encoder(32, 64), voice=32, ahead=2, behind=4),
        "num_embeds": 1025,
    },
    reference_frames=300,
    vocoder={
        **TINY.vocoder,
        "upsample_initial_channel": 256,
        "upsample_rates": [5, 4, 4, 3],
        "upsample_kernel_sizes": [11, 8, 8, 7],
    },
)
