"""What conditions a request's diffusion, computed once: its voice, its codec ids, its positions, its past.

Reference: ``DiTInputEmbedding`` and ``DiTCodecEmbedding`` of transformers, which compute all this anew
for each of the 36 evaluations of an utterance.

A frame of the DiT sees the block before its own, in the layers that look back, and nothing further.  So
all that a chunk's first block needs of the past are the keys and values that the last block before it
had, in those layers, at every evaluation of the network: the solver evaluates it at the same times for
every chunk of a stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig

from omnirelay.errors import CheckpointError, UnknownSpeakerError
from services.families.qwen2_5_omni.token2wav.blocks import MOST_FILLED, build_layout, filled_size, to_blocks
from services.families.qwen2_5_omni.token2wav.dit import DiffusionTransformer, DiTBatch, layers_looking_back
from services.families.qwen2_5_omni.token2wav.noise import initial_noise
from services.families.qwen2_5_omni.token2wav.ode import EVALUATIONS_PER_STEP, evaluation_times, time_points
from services.families.qwen2_5_omni.voices import Speaker
from services.token2wav.chunks import StreamState, SynthesisChunk
from shared.config import SynthesisConfig
from shared.vllm.transfer import to_device


@dataclass(eq=False)
class StreamPast:
    """What the chunks of a stream so far leave.

    Attributes:
        mel: log-mel frames made audio last, float32 [frames, mel_dim]; None where there are none.
        attention: keys and values of the last block made audio, float32
            [evaluations, layers that look back, 2, branches, heads, block_size, head_dim]; None where
            they are not known.
        overlap: samples behind those made audio last, which the next chunk makes again from a better
            spectrogram, float32 [samples]; None where no chunk follows or audio was not wanted.
    """

    mel: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    overlap: torch.Tensor | None = None


def past_of(stream: StreamState) -> StreamPast:
    """What a stream's chunks left; made with the first of them."""
    if not isinstance(stream.left, StreamPast):
        stream.left = StreamPast()
    return stream.left


@dataclass(frozen=True, eq=False)
class CarriedChunk:
    """How one chunk of a batch takes over and leaves keys and values."""

    past: torch.Tensor  # The ``attention`` of :class:`StreamPast`
    request: int  # The chunk's number in the batch
    continues: bool  # Whether ``past`` holds what the chunk before left
    leaves: bool  # Whether a chunk follows

    def at(self, evaluations: Sequence[int]) -> torch.Tensor:
        """What is held for the evaluations of a step, of which each request's first is given."""
        first = evaluations[self.request]
        return self.past[first : first + EVALUATIONS_PER_STEP]


@dataclass(frozen=True, eq=False)
class Carry:
    """Keys and values that the chunks of a batch take over and leave; in the order of the batch.

    ``filler`` is of the same shape: of so many further rows as the batch takes over, or of none.
    """

    chunks: Sequence[CarriedChunk]
    filler: torch.Tensor

    def take(self, evaluations: Sequence[int]) -> torch.Tensor:
        """What those chunks that continue take over in a step of the solver.

        Returns float32 [evaluations, layers that look back, 2, continued rows, heads, block_size, head_dim].
        """
        return torch.cat(
            [chunk.at(evaluations) for chunk in self.chunks if chunk.continues] + [self.filler], dim=3
        )

    def leave(self, evaluations: Sequence[int], left: torch.Tensor) -> None:
        """Keep what a step leaves, so shaped with the rows left, where what it took over was."""
        row = 0
        for place in (chunk.at(evaluations) for chunk in self.chunks if chunk.leaves):
            place.copy_(left[:, :, :, row : row + place.shape[3]])
            row += place.shape[3]


_NO_GUIDANCE_BELOW = 1e-5


@dataclass(frozen=True, eq=False)
class Voice:
    """A voice as the transformer's input wants it, float32 [hidden] each."""

    conditioned: torch.Tensor
    unconditioned: torch.Tensor


@dataclass
class SolverState:
    """One request between two steps of the solver."""

    chunk: SynthesisChunk
    past: StreamPast  # What the chunks before it left, and where it leaves what the next will need
    continues: bool  # Whether the chunk before left its keys and values
    frames: int  # Mel frames in the window
    mel: torch.Tensor  # The noisy mel, float32 [blocks, block_size, mel_dim]
    conditioned: torch.Tensor  # Constant input, float32 [blocks, block_size, hidden]
    unconditioned: torch.Tensor | None  # The same, float32 [hidden]; None without guidance
    rotation: torch.Tensor  # Rotary table, complex64 [blocks, block_size, head_dim / 2]
    due_pieces: list[int] = field(default_factory=list)  # Numbers of those that become audio now
    audio: list[torch.Tensor] = field(default_factory=list)  # Of the pieces so far, float32 [samples] each
    early_audio: dict[int, torch.Tensor] = field(default_factory=dict)  # By due piece, made with others

    def split_mel(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the frames before the target, the target and the frames after it, [frames, mel_dim] each."""
        mel = self.mel.flatten(0, 1)[: self.frames]
        before = mel[:0] if self.past.mel is None else self.past.mel
        return before, mel[: self.chunk.target_frames], mel[self.chunk.target_frames :]

    def leave_mel(self, frames: int) -> None:
        """Leave the stream's next chunk the last so many mel frames before its target."""
        before, target, _ = self.split_mel()
        self.past.mel = torch.cat([before, target])[-frames:]


class Conditioner:
    """Prepares requests for a transformer, whose weights are loaded, and puts prepared ones into a batch."""

    def __init__(
        self, dit: DiffusionTransformer, speakers: Mapping[str, Speaker], config: SynthesisConfig
    ) -> None:
        self._dit = dit
        self._guided = config.guidance_scale >= _NO_GUIDANCE_BELOW
        self._points = time_points(config.time_points, config.sway_coefficient)
        self._speakers = speakers
        self._voices: dict[str, Voice] = {}

    @property
    def _device(self) -> torch.device:
        return self._dit.input_embed.proj.weight.device

    def voice(self, name: str) -> Voice:
        """Embed a voice, or recall it; raises UnknownSpeakerError if the checkpoint lacks it."""
        if name not in self._voices:
            speaker = self._speakers.get(name)
            if speaker is None:
                known = ", ".join(sorted(self._speakers))
                raise UnknownSpeakerError(f"no voice {name!r} in this checkpoint; it has: {known}")
            self._voices[name] = self._embed(speaker)
        return self._voices[name]

    def _embed(self, speaker: Speaker) -> Voice:
        embed = self._dit.input_embed
        cond, ref_mel = speaker.cond.to(self._device), speaker.ref_mel.to(self._device)
        # Without its condition a frame has silence for a voice, no speaker and codec id 0.
        silence = embed.project_voice(torch.zeros_like(ref_mel), torch.zeros_like(cond))
        no_code = embed.project_codes(self._dit.text_embed.codec_embed.weight[0])
        return Voice(embed.project_voice(ref_mel, cond), silence + no_code)

    def prepare(self, chunk: SynthesisChunk) -> SolverState:
        """Compute what of a valid chunk is the same in all the solver's steps; raises UnknownSpeakerError."""
        config = self._dit.config
        voice = self.voice(chunk.speaker)
        codes = to_device(torch.tensor(chunk.codes), self._device)
        embedded = self._dit.text_embed.codec_embed(codes)
        constant = self._dit.input_embed.project_codes(embedded) + voice.conditioned
        frames = len(chunk.codes) * config.repeats
        noise = initial_noise(chunk.seed, frames, config.mel_dim, start=chunk.start)
        past = past_of(chunk.stream)
        continues = past.attention is not None
        if not (continues or chunk.is_last):
            past.attention = self._room_for_past(len(self._lengths), 1 + self._guided)
        return SolverState(
            chunk=chunk,
            past=past,
            continues=continues,
            frames=frames,
            mel=to_blocks(to_device(noise, self._device), config.block_size),
            conditioned=to_blocks(constant.repeat_interleave(config.repeats, dim=0), config.block_size),
            unconditioned=voice.unconditioned if self._guided else None,
            rotation=to_blocks(self._rotary(chunk.start, frames), config.block_size),
        )

    @cached_property
    def _lengths(self) -> torch.Tensor:
        """Of the step that each evaluation belongs to, float32 [steps * 4]."""
        return self._points.diff().repeat_interleave(EVALUATIONS_PER_STEP).to(self._device)

    @cached_property
    def _modulation(self) -> torch.Tensor:
        """Of the transformer at each evaluation, float32 [steps * 4, values]."""
        return self._dit.modulation(evaluation_times(self._points).to(self._device))

    def _rotary(self, start: int, frames: int) -> torch.Tensor:
        """Rotary table at the positions that the frames have in the stream, [frames, head_dim / 2]."""
        positions = torch.arange(start, start + frames, device=self._device)
        cos, sin = self._dit.rotary_embed(self._dit.input_embed.proj.weight, positions)
        half = cos.shape[-1] // 2
        return torch.complex(cos[:, :half], sin[:, :half])

    def _room_for_past(self, evaluations: int, rows: int) -> torch.Tensor:
        config = self._dit.config
        return torch.zeros(
            evaluations,
            len(layers_looking_back(config)),
            2,
            rows,
            config.num_attention_heads,
            config.block_size,
            config.head_dim,
            device=self._device,
        )

    def batch(self, states: Sequence[SolverState], fill: bool = False) -> "SolverBatch":
        """Put prepared requests into one batch, in order; ``fill`` it up to one of few sizes if it pays."""
        further = [
            state.unconditioned.expand_as(state.conditioned)
            for state in states
            if state.unconditioned is not None
        ]
        sizes = [state.mel.shape[0] for state in states]
        fill = fill and sum(sizes) < MOST_FILLED
        filler = filled_size(sum(sizes)) - sum(sizes) if fill else 0
        layout = build_layout(
            [state.frames for state in states],
            self._guided,
            self._dit.config.block_size,
            self._device,
            [state.continues for state in states],
            [self._left_block(state) for state in states],
            fill,
        )
        carried = [
            CarriedChunk(state.past.attention, request, state.continues, not state.chunk.is_last)
            for request, state in enumerate(states)
            if state.past.attention is not None
        ]
        taken = sum(each.past.shape[3] for each in carried if each.continues)
        return SolverBatch(
            DiTBatch(
                layout=layout,
                constant=torch.cat(
                    [*_filled([state.conditioned for state in states], filler), *_filled(further, filler)]
                ),
                rotation=torch.view_as_real(
                    torch.cat(_filled([state.rotation for state in states], filler))[layout.source]
                ),
                modulation=self._modulation,
                length=self._lengths,
            ),
            Carry(carried, self._room_for_past(EVALUATIONS_PER_STEP, layout.continued.shape[0] - taken)),
            [*sizes, filler],
            fill,
        )

    def _left_block(self, state: SolverState) -> int | None:
        """The block of a window that the next chunk takes over; None if none follows or nothing is kept."""
        if state.chunk.is_last or state.past.attention is None:
            return None
        return state.chunk.target_frames // self._dit.config.block_size - 1


def _filled(parts: list[torch.Tensor], filler: int) -> list[torch.Tensor]:
    """These rows of some requests, and zeros in so many further rows."""
    return [*parts, parts[0].new_zeros(filler, *parts[0].shape[1:])] if parts and filler else parts


@dataclass
class SolverBatch:
    """A batch of requests: what the transformer computes with, and what the host knows of it."""

    tensors: DiTBatch
    carry: Carry
    sizes: list[int]  # Source rows of each request, and those that fill
    filled: bool  # Whether its tensors have one of few sizes

    def evaluations(self, firsts: Sequence[int]) -> torch.Tensor:
        """The first evaluation of a step of each request: of each row, or where all have the same, of all."""
        request = self.tensors.layout.request
        if not self.filled and len(set(firsts)) == 1:
            return to_device(torch.tensor(firsts[:1]), request.device)
        return to_device(torch.tensor([*firsts, 0]), request.device)[request]

    def mel(self, states: Sequence[SolverState]) -> torch.Tensor:
        """The noisy mel of all, float32 [source rows, block_size, mel_dim]."""
        first = states[0].mel
        return torch.cat(
            [state.mel for state in states] + [first.new_zeros(self.sizes[-1], *first.shape[1:])]
        )


def check_speakers(speakers: Mapping[str, Speaker], config: Qwen2_5OmniDiTConfig, path: Path) -> None:
    """Raise CheckpointError, naming file and key, at voices that do not fit the transformer."""
    # Reflection needs more frames than it adds.
    shortest = 1 + max(
        (kernel - 1) * dilation // 2
        for kernel, dilation in zip(config.enc_kernel_sizes, config.enc_dilations, strict=True)
    )
    for speaker in speakers.values():
        if speaker.cond.shape[1] != config.enc_emb_dim:
            raise CheckpointError(
                f"{path}: {speaker.name}.cond has {speaker.cond.shape[1]} values, "
                f"dit_config.enc_emb_dim is {config.enc_emb_dim}"
            )
        _, frames, mel_dim = speaker.ref_mel.shape
        if mel_dim != config.mel_dim or frames < shortest:
            raise CheckpointError(
                f"{path}: {speaker.name}.ref_mel has shape {list(speaker.ref_mel.shape)}, "
                f"expected [1, {shortest} or more, {config.mel_dim}]"
            )
