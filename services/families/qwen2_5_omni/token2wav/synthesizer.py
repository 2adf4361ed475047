"""Advances chunks by the solver steps that they are given, and makes solved ones audio; what that costs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Self, TypeAlias

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
    Qwen2_5OmniToken2WavConfig,
)

from omnirelay.errors import CheckpointError
from services.families.qwen2_5_omni.token2wav.conditioning import Conditioner, SolverBatch, SolverState
from services.families.qwen2_5_omni.token2wav.dit import DiffusionTransformer
from services.families.qwen2_5_omni.token2wav.ode import EVALUATIONS_PER_STEP
from services.families.qwen2_5_omni.token2wav.vocoder import Vocoder, samples_per_frame
from services.token2wav.chunks import CodecGeometry, SynthesisChunk
from services.token2wav.family import Cost
from shared.config import SynthesisConfig
from shared.vllm.recorded import Record, Recorded


def component_configs(config: object) -> tuple[Qwen2_5OmniDiTConfig, Qwen2_5OmniBigVGANConfig]:
    """Configurations of transformer and vocoder; raises CheckpointError if they do not fit each other."""
    if not isinstance(config, Qwen2_5OmniToken2WavConfig):
        raise CheckpointError(f"expected a token2wav configuration, got {type(config).__name__}")
    dit, bigvgan = config.dit_config, config.bigvgan_config
    if not isinstance(dit, Qwen2_5OmniDiTConfig) or not isinstance(bigvgan, Qwen2_5OmniBigVGANConfig):
        raise CheckpointError("token2wav_config: dit_config or bigvgan_config is missing")
    if dit.mel_dim != bigvgan.mel_dim:
        raise CheckpointError(
            f"token2wav_config: dit_config.mel_dim is {dit.mel_dim}, bigvgan_config.mel_dim {bigvgan.mel_dim}"
        )
    return dit, bigvgan


@dataclass(frozen=True)
class SolverWork:
    """See :class:`services.token2wav.family.Work`.

    A chunk takes solver steps, the last of which makes the first piece of audio, and then further pieces.
    """

    geometry: CodecGeometry
    config: SynthesisConfig

    @classmethod
    def of(cls, config: object, synthesis: SynthesisConfig) -> Self:
        """That of a checkpoint's token2wav; raises CheckpointError if its parts do not fit each other."""
        dit, vocoder = component_configs(config)
        geometry = CodecGeometry(
            block_size=dit.block_size,
            repeats=dit.repeats,
            max_frames=dit.max_position_embeddings,
            unit_samples=samples_per_frame(vocoder),
            # The table has a row more than num_embeds says (reference: DiTCodecEmbedding).
            ids=dit.num_embeds + 1,
        )
        return cls(geometry, synthesis)

    @property
    def steps(self) -> int:
        """Solver steps of a chunk."""
        return self.config.time_points - 1

    def advances(self, chunk: SynthesisChunk) -> int:
        """Its solver steps, the last of which makes audio, and further pieces of audio."""
        return self.steps - 1 + self.pieces(chunk)

    def cost(self, chunk: SynthesisChunk, done: int) -> Cost:
        """The whole window for a solver step, and a piece of the target for audio."""
        solved = self.geometry.window_frames(chunk.codes) if done < self.steps else 0
        if done < self.steps - 1 or chunk.silent:
            return Cost(solved, 0)
        return Cost(solved, -(-chunk.target_frames // self.pieces(chunk)))

    def pieces(self, chunk: SynthesisChunk) -> int:
        """In how many pieces a chunk becomes audio."""
        return 1 if chunk.silent else -(-chunk.target_frames // self.config.max_vocoder_frames)


Mel: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Frames before a piece of audio, its own, and those after it, float32 [frames, mel_dim] each."""


OVERLAP_FRAMES: Final = 2
"""Mel frames, 20 ms, over which a chunk's audio fades into the next one's."""
_MOST_RECORDED_FRAMES: Final = 1024
"""Of pieces made audio at once; what is larger keeps a GPU busy anyway."""


class SolverSynthesizer:
    """See :class:`services.token2wav.family.Synthesizer`.

    An advance of a chunk is a solver step or a piece of audio; the last step makes the first piece too.
    On a CPU it takes as long to make pieces of equal shapes audio ``together``, and the last bits of a stream
    would depend on its neighbours.  With a ``record``, steps and pieces of usual sizes are recorded, the
    layers in such steps ``compiled`` or not.
    """

    def __init__(
        self,
        dit: DiffusionTransformer,
        vocoder: Vocoder,
        conditioner: Conditioner,
        work: SolverWork,
        together: bool = False,
        record: Record | None = None,
        compiled: bool = False,
    ) -> None:
        self._dit = dit
        self._vocoder = vocoder
        self._conditioner = conditioner
        self._work = work
        self._together = together
        self._solve = Recorded(partial(dit.step, compiled=compiled), record) if record else None
        self._make_audio = Recorded(lambda *mel: (vocoder(*mel),), record) if record else None

    @property
    def records(self) -> int:
        """Sizes of steps and pieces that have been recorded."""
        return sum(each.sizes for each in (self._solve, self._make_audio) if each)

    def prepare(self, chunk: SynthesisChunk) -> SolverState:
        """Compute everything of a chunk that does not change over the solver's steps."""
        return self._conditioner.prepare(chunk)

    def advance(self, states: Sequence[SolverState], advances: Sequence[range]) -> None:
        """Take one step after the other, each of all chunks that still have one to take."""
        steps, last = [], self._work.steps - 1
        for state, taken in zip(states, advances, strict=True):
            steps.append([(state, step) for step in taken if step <= last])
            state.due_pieces += [step - last for step in taken if step >= last]
        batch: SolverBatch | None = None
        size = 0
        for offset in range(max(map(len, steps), default=0)):
            active = [of_one[offset] for of_one in steps if offset < len(of_one)]
            if batch is None or len(active) != size:
                batch, size = (
                    self._conditioner.batch([state for state, _ in active], self._solve is not None),
                    len(active),
                )
            self._step(active, batch)
        if self._together:
            self._vocode_together(states)

    def finished(self, state: SolverState) -> torch.Tensor | None:
        """Make the pieces of audio that are due; gives the whole after the last one."""
        pieces = self._work.pieces(state.chunk)
        due, state.due_pieces = state.due_pieces, []
        state.audio += [self._vocode(state, piece, pieces) for piece in due]
        if len(state.audio) < pieces:
            return None
        state.leave_mel(self._vocoder.context.left)
        return self._joined(state)

    def _joined(self, state: SolverState) -> torch.Tensor:
        """A chunk's samples, faded in from those that the one before made of its look-ahead."""
        audio, past = torch.cat(state.audio), state.past
        if state.chunk.silent:
            return audio
        waveform, overlap = audio.tensor_split([state.chunk.target_frames * self._vocoder.hop])
        if past.overlap is not None:
            before = past.overlap[: waveform.numel()]
            rising = torch.linspace(0, 1, before.numel() + 2, device=audio.device)[1:-1]
            faded = torch.lerp(before, waveform[: before.numel()], rising)
            waveform = torch.cat([faded, waveform[before.numel() :]])
        past.overlap = None if state.chunk.is_last else overlap
        return waveform

    def _step(self, active: Sequence[tuple[SolverState, int]], batch: SolverBatch) -> None:
        states = [state for state, _ in active]
        firsts = [step * EVALUATIONS_PER_STEP for _, step in active]
        solve = self._solve if self._solve and batch.filled else self._dit.step
        mel, left = solve(
            batch.mel(states), batch.evaluations(firsts), batch.carry.take(firsts), batch.tensors
        )
        batch.carry.leave(firsts, left)
        for state, advanced in zip(states, mel.split(batch.sizes), strict=False):
            state.mel = advanced

    def _vocode_together(self, states: Sequence[SolverState]) -> None:
        """Make due pieces audio that have the same shapes."""
        alike: dict[tuple[torch.Size, ...], list[tuple[SolverState, int, Mel]]] = defaultdict(list)
        for state in states:
            for piece in [] if state.chunk.silent else state.due_pieces:
                mel = self._mel_of(state, piece, self._work.pieces(state.chunk))
                alike[tuple(part.shape for part in mel)].append((state, piece, mel))
        for members in alike.values():
            mels = tuple(torch.stack(part) for part in zip(*(mel for _, _, mel in members), strict=True))
            if self._make_audio and self._is_usual(members):
                # Further copies of the first fill up to a power of two.
                filler = (1 << (len(members) - 1).bit_length()) - len(members)
                (waveforms,) = self._make_audio(
                    *(torch.cat([part, part[:1].expand(filler, -1, -1)]) for part in mels)
                )
            elif len(members) > 1:
                waveforms = self._vocoder(*mels)
            else:
                continue
            for (state, piece, _), waveform in zip(members, waveforms, strict=False):
                state.early_audio[piece] = waveform

    def _is_usual(self, members: Sequence[tuple[SolverState, int, Mel]]) -> bool:
        """Whether pieces of these shapes come again and leave a GPU idle: of an end, any length may be."""
        frames = sum(part.shape[0] for part in members[0][2]) * len(members)
        return frames <= _MOST_RECORDED_FRAMES and any(
            not state.chunk.is_last or piece < self._work.pieces(state.chunk) - 1
            for state, piece, _ in members
        )

    def _vocode(self, state: SolverState, piece: int, pieces: int) -> torch.Tensor:
        """Make one of so many pieces audio, float32 [samples]; of a silent chunk there are none."""
        if state.chunk.silent:
            return state.mel.new_empty(0)
        early = state.early_audio.pop(piece, None)
        waveform = self._vocoder(*self._mel_of(state, piece, pieces)) if early is None else early
        return waveform.float()

    def _mel_of(self, state: SolverState, piece: int, pieces: int) -> Mel:
        """Frames before one of so many pieces, its own, and those after it."""
        before, target, after = state.split_mel()
        frames = target.shape[0]
        start, end = frames * piece // pieces, frames * (piece + 1) // pieces
        # Of what is more than the context on either side the vocoder takes no notice.
        left = torch.cat([before, target[max(0, start - self._vocoder.context.left) : start]])
        if end < frames:
            return (
                left,
                target[start:end],
                torch.cat([target[end : end + self._vocoder.context.right], after]),
            )
        return left, torch.cat([target[start:], after[:OVERLAP_FRAMES]]), after[OVERLAP_FRAMES:]
