"""What a checkpoint is made of: the sizes of its parts and the ids of its special tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from omnirelay.errors import CheckpointError

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
        pairs = {_TEXTS[item.name]: int(getattr(self, item.name)) for item in fields(self)}
        return dict(sorted(pairs.items(), key=lambda pair: pair[1]))

    def speakers(self) -> dict[str, int]:
        """Return the id that starts the speech of each voice, by the voice's name."""
        return dict(zip(SPEAKERS, (self.chelsie, self.ethan), strict=True))


_TEXTS = {
    "end_of_text": "<|endoftext|>",
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "audio": "<|AUDIO|>",
    "audio_bos": "<|audio_bos|>",
    "audio_eos": "<|audio_eos|>",
    "vision_bos": "<|vision_bos|>",
    "vision_eos": "<|vision_eos|>",
    "vision_pad": "<|vision_pad|>",
    "image": "<|IMAGE|>",
    "video": "<|VIDEO|>",
    "speech_pad": "<|speech_pad|>",
    "speech_start": "<|speech_start|>",
    "speech_end": "<|speech_end|>",
    "chelsie": "<|voice_chelsie|>",
    "ethan": "<|voice_ethan|>",
}


@dataclass(frozen=True)
class VocabularyShape:
    """The text vocabulary: ``trained`` byte-pair tokens, fillers up to the first special id, specials.

    ``size`` is the number of rows of the thinker's embedding, at least one more than the largest id.
    """

    trained: int = 1536
    size: int = 1600
    ids: SpecialIds = field(default_factory=lambda: SpecialIds.compact(1536))


RELEASED_VOCABULARY = VocabularyShape(
    size=152064,
    ids=SpecialIds(
        end_of_text=151643,
        im_start=151644,
        im_end=151645,
        audio=151646,
        audio_bos=151647,
        audio_eos=151648,
        vision_bos=151652,
        vision_eos=151653,
        vision_pad=151654,
        image=151655,
        video=151656,
        speech_pad=151859,
        speech_start=151860,
        speech_end=151861,
        chelsie=151872,
        ethan=151873,
    ),
)


@dataclass(frozen=True)
class ThinkerShape:
    """The thinker's text model; a head has ``hidden_size / heads`` values."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    max_positions: int = 8192

    @property
    def head_dim(self) -> int:
        """Values of one attention head."""
        return self.hidden_size // self.heads


@dataclass(frozen=True)
class TalkerShape:
    """The talker's text model; its embedding is as wide as the thinker's hidden state.

    ``mrope_sections`` are pairs of rotated values for time, height and width; None for a quarter, and the
    rest in halves, as the thinker has them.
    """

    hidden_size: int = 96
    intermediate_size: int = 192
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    max_positions: int = 8192
    mrope_sections: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class AudioShape:
    """The audio encoder; recordings are cut at ``longest_seconds`` (25 tokens a second)."""

    hidden_size: int = 64
    intermediate_size: int = 128
    layers: int = 2
    heads: int = 4
    longest_seconds: int = 60


@dataclass(frozen=True)
class VisionShape:
    """The image and video encoder.

    A picture is scaled to ``fewest_tokens`` to ``most_tokens`` tokens of 28x28 pixels.  Layers of
    ``full_attention`` see all of it, by default the last one; others see windows.
    """

    hidden_size: int = 64
    intermediate_size: int = 128
    layers: int = 2
    heads: int = 4
    fewest_tokens: int = 4
    most_tokens: int = 256
    full_attention: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DiTShape:
    """The diffusion transformer, from codec ids to a mel spectrogram, and its speaker encoder.

    ``encoder_attention_channels`` are those of the speaker encoder's attention and of its squeeze-excitation,
    by default half of its channels.
    """

    hidden_size: int = 64
    layers: int = 4
    heads: int = 4
    head_dim: int = 16
    embedding_size: int = 32
    look_ahead_layers: tuple[int, ...] = (1,)
    look_backward_layers: tuple[int, ...] = (0, 2)
    codes: int = 8193
    max_positions: int = 32768
    speaker_size: int = 32
    encoder_size: int = 16
    encoder_channels: int = 32
    encoder_attention_channels: int | None = None
    reference_frames: int = 200


@dataclass(frozen=True)
class VocoderShape:
    """The vocoder, from a mel spectrogram to 24,000 samples a second (240 a frame)."""

    channels: int = 128
    kernel_sizes: tuple[int, ...] = (3, 7)
    rates: tuple[int, ...] = (5, 3, 2, 2, 2, 2)
    rate_kernels: tuple[int, ...] = (11, 7, 4, 4, 4, 4)


@dataclass(frozen=True)
class CheckpointShape:
    """Sizes of a whole checkpoint; the defaults are those of :data:`TINY`."""

    vocabulary: VocabularyShape = field(default_factory=VocabularyShape)
    thinker: ThinkerShape = field(default_factory=ThinkerShape)
    talker: TalkerShape = field(default_factory=TalkerShape)
    audio: AudioShape = field(default_factory=AudioShape)
    vision: VisionShape = field(default_factory=VisionShape)
    dit: DiTShape = field(default_factory=DiTShape)
    vocoder: VocoderShape = field(default_factory=VocoderShape)

    def validate(self) -> None:
        """Raise :class:`CheckpointError` for sizes of which no working checkpoint can be made."""
        for name, part in (("thinker", self.thinker), ("talker", self.talker)):
            _require(part.head_dim >= SMALLEST_HEAD, f"{name}.head_dim is {part.head_dim}; use 32 or more")
            _require(part.heads % part.key_value_heads == 0, f"{name}.heads must be k x key_value_heads")
        _require(self.thinker.hidden_size % self.thinker.heads == 0, "thinker.hidden_size must be k x heads")
        ids = list(self.vocabulary.ids.tokens().values())
        _require(len(set(ids)) == len(ids), "vocabulary.ids names one id twice")
        _require(ids[0] >= self.vocabulary.trained, "vocabulary.ids overlaps the trained tokens")
        _require(ids[-1] < self.vocabulary.size, "vocabulary.size is too small for vocabulary.ids")
        _require(self.vocabulary.ids.end_of_text == ids[0], "vocabulary.ids must start with end_of_text")
        for layer in (*self.dit.look_ahead_layers, *self.dit.look_backward_layers):
            _require(layer < self.dit.layers, f"the DiT has no layer {layer}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise CheckpointError(f"the shape cannot be built: {problem}")


TINY = CheckpointShape()
# Speaks faster than real time on two cores; each stage takes 20 to 50% of transformers' time.
SMALL = CheckpointShape(
    thinker=ThinkerShape(hidden_size=1024, intermediate_size=4096, layers=10, heads=16, key_value_heads=4),
    talker=TalkerShape(
        hidden_size=512, intermediate_size=1536, layers=6, heads=8, key_value_heads=2, head_dim=64
    ),
    audio=AudioShape(hidden_size=256, intermediate_size=1024, layers=4, heads=4),
    vision=VisionShape(hidden_size=256, intermediate_size=1024, layers=4, heads=4),
    dit=DiTShape(
        hidden_size=128,
        layers=3,
        heads=2,
        head_dim=64,
        embedding_size=128,
        speaker_size=64,
        encoder_size=64,
        encoder_channels=64,
        reference_frames=200,
    ),
    vocoder=VocoderShape(channels=64, kernel_sizes=(3,)),
)
# Half of the layers of the released thinker of 3B parameters, and a talker with the sizes of Qwen2 0.5B: each
# step takes tens of milliseconds, each stage 20 to 50% of transformers' time for an answer of 10 s.
BENCH = CheckpointShape(
    thinker=ThinkerShape(
        hidden_size=2048,
        intermediate_size=11008,
        layers=18,
        heads=16,
        key_value_heads=2,
        max_positions=4096,
    ),
    talker=TalkerShape(
        hidden_size=896,
        intermediate_size=4864,
        layers=24,
        heads=14,
        key_value_heads=2,
        head_dim=64,
        max_positions=4096,
    ),
    audio=SMALL.audio,
    vision=SMALL.vision,
    dit=replace(SMALL.dit, hidden_size=512, layers=4, heads=8, embedding_size=512),
    vocoder=SMALL.vocoder,
)
# The shapes of Qwen2.5-Omni-3B as released, by the configuration of it that InternLM's XTuner has
# (Qwen2_5Omni3BConfig); what that leaves out (DiT, vocoder) is what transformers has by default.
RELEASED_3B = CheckpointShape(
    vocabulary=replace(RELEASED_VOCABULARY, size=151936),
    thinker=ThinkerShape(
        hidden_size=2048,
        intermediate_size=11008,
        layers=36,
        heads=16,
        key_value_heads=2,
        max_positions=32768,
    ),
    talker=TalkerShape(
        hidden_size=896,
        intermediate_size=4864,
        layers=24,
        heads=14,
        key_value_heads=2,
        head_dim=64,
        max_positions=32768,
        mrope_sections=(16, 16, 0),
    ),
    audio=AudioShape(hidden_size=1280, intermediate_size=5120, layers=32, heads=20, longest_seconds=300),
    vision=VisionShape(
        hidden_size=1280,
        intermediate_size=3420,
        layers=32,
        heads=16,
        most_tokens=16384,
        full_attention=(7, 15, 23, 31),
    ),
    dit=DiTShape(
        hidden_size=1024,
        layers=22,
        heads=16,
        head_dim=64,
        embedding_size=512,
        look_ahead_layers=(10,),
        look_backward_layers=(0, 20),
        speaker_size=192,
        encoder_size=128,
        encoder_channels=256,
        encoder_attention_channels=64,
    ),
    vocoder=VocoderShape(channels=1536, kernel_sizes=(3, 7, 11)),
)
# The sizes of the checkpoint that `labs.training` makes: answers, and fits into a repository.
SPEAKING = CheckpointShape(
    thinker=ThinkerShape(hidden_size=192, intermediate_size=512, layers=4, heads=3, key_value_heads=3),
    talker=TalkerShape(
        hidden_size=256, intermediate_size=768, layers=4, heads=4, key_value_heads=2, head_dim=64
    ),
    audio=AudioShape(hidden_size=192, intermediate_size=512, layers=4, heads=3, longest_seconds=30),
    vision=VisionShape(
        hidden_size=128, intermediate_size=384, layers=4, heads=4, fewest_tokens=36, most_tokens=36
    ),
    dit=DiTShape(
        hidden_size=160,
        layers=6,
        heads=5,
        head_dim=32,
        embedding_size=128,
        look_ahead_layers=(2,),
        look_backward_layers=(0, 4),
        codes=1025,
        encoder_size=32,
        encoder_channels=64,
        reference_frames=300,
    ),
    vocoder=VocoderShape(channels=256, rates=(5, 4, 4, 3), rate_kernels=(11, 8, 8, 7)),
)
