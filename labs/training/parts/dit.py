"""Trains the diffusion transformer of token2wav: flow matching, as the reference samples it.

The reference solves ``dx/dt = v(x, t)`` from noise at 0 to the mel at 1, and guides with a branch whose
codes, speaker and reference are all dropped; so they are dropped together in some of the training too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from checkpoint.config import dit_config
from checkpoint.shape import SPEAKING, CheckpointShape
from labs.training.data.corpus import FRAMES_PER_CODE, VOICES, SpeechCorpus
from labs.training.parts.loop import Losses, Recipe, Step, Stop, Training, device

NAME = "dit"
RECIPE = Recipe(steps=5_000, rate=1e-3)
_BATCH = 16
_FRAMES = 192
_DROPPED = 0.12
_FROM_START = 0.5
_SEED = 0


@dataclass(frozen=True)
class SpeakerCondition:
    """What ``spk_dict.pt`` holds of a voice: ``cond`` ``[speaker_size]``, ``ref_mel`` ``[frames, 80]``."""

    cond: torch.Tensor
    ref_mel: torch.Tensor


def speakers(corpus: SpeechCorpus, shape: CheckpointShape = SPEAKING) -> dict[str, SpeakerCondition]:
    """Return the voices: a vector that names each, and some of its speech."""
    generator = torch.Generator().manual_seed(_SEED)
    found = {}
    for voice in VOICES:
        mels = np.concatenate([corpus.mel(item) for item in corpus.of(voice)[:20]])
        reference = torch.from_numpy(mels[: shape.reference_frames])
        found[voice] = SpeakerCondition(torch.randn(shape.dit["enc_emb_dim"], generator=generator), reference)
    return found


def build(shape: CheckpointShape = SPEAKING) -> Any:
    """Return a new ``Qwen2_5OmniToken2WavDiTModel``, the same for every call."""
    config = Qwen2_5OmniDiTConfig(**dit_config(shape), dropout=0.0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        model = Qwen2_5OmniToken2WavDiTModel._from_config(config, attn_implementation="sdpa")
        modulations = [block.attn_norm.linear for block in model.transformer_blocks]
        for linear in (*modulations, model.norm_out.linear, model.proj_out):
            linear.weight.zero_()
            linear.bias.zero_()
    return model


class _CodedSpeech:
    """All training speech of one voice in a row, and where sentences start in it."""

    def __init__(self, corpus: SpeechCorpus, voice: str, codes: npt.NDArray[np.int64]) -> None:
        items = corpus.of(voice)
        self.mels = np.concatenate(
            [corpus.mels[2 * item.first : 2 * (item.first + item.codes)] for item in items]
        )
        self.codes = np.concatenate([codes[item.first : item.first + item.codes] for item in items])
        self._starts = np.cumsum([0, *(item.codes for item in items)])[:-1]

    def window(self, draw: np.random.Generator) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Return mels and codes of a window, as often as not from the start of a sentence."""
        length = _FRAMES // FRAMES_PER_CODE
        last = len(self.codes) - length
        start = draw.choice(self._starts) if draw.random() < _FROM_START else draw.integers(last)
        start = min(int(start), last)
        mels = self.mels[FRAMES_PER_CODE * start : FRAMES_PER_CODE * (start + length)].astype(np.float32)
        return mels, self.codes[start : start + length]

    def reference(self, draw: np.random.Generator, frames: int) -> npt.NDArray[np.float32]:
        """Return some speech of the voice."""
        start = int(draw.integers(len(self.mels) - frames))
        return self.mels[start : start + frames].astype(np.float32)


def train(
    corpus: SpeechCorpus, codes: npt.NDArray[np.int64], directory: Path, stop: Stop, recipe: Recipe = RECIPE
) -> Training:
    """Train the DiT, resuming the state in ``directory``."""
    place = device()
    model = build()
    speech = {voice: _CodedSpeech(corpus, voice, codes) for voice in VOICES}
    mean = np.mean([ours.mels.astype(np.float32).mean(0) for ours in speech.values()], axis=0)
    with torch.no_grad():
        model.proj_out.bias.copy_(torch.from_numpy(mean))
    model.to(place)
    training = Training(NAME, model, recipe, directory)
    names = speakers(corpus)

    def losses_of(step: Step) -> Losses:
        batch = _batch(speech, names, np.random.default_rng(step.seed))
        return {"flow": _flow_loss(model, {name: value.to(place) for name, value in batch.items()})}

    training.run(losses_of, stop)
    return training


def _batch(
    speech: Mapping[str, _CodedSpeech], names: Mapping[str, SpeakerCondition], draw: np.random.Generator
) -> dict[str, torch.Tensor]:
    mels, codes, conds, references = [], [], [], []
    for _ in range(_BATCH):
        voice = str(draw.choice(list(speech)))
        window, ids = speech[voice].window(draw)
        speaker = names[voice]
        reference = speaker.ref_mel
        if draw.random() < 0.5:
            reference = torch.from_numpy(speech[voice].reference(draw, len(reference)))
        kept = float(draw.random() >= _DROPPED)
        mels.append(torch.from_numpy(window))
        codes.append(torch.from_numpy(ids) * int(kept))
        conds.append(speaker.cond * kept)
        references.append(reference * kept)
    return {
        "mels": torch.stack(mels),
        "codes": torch.stack(codes),
        "conds": torch.stack(conds),
        "references": torch.stack(references),
    }


def _flow_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    mels = batch["mels"]
    noise = torch.randn(mels.shape).to(mels.device)
    time = torch.rand(len(mels)).to(mels.device)
    velocity = model(
        hidden_states=noise + time[:, None, None] * (mels - noise),
        condition_vector=batch["references"],
        speaker_embedding=batch["conds"][:, None].expand(-1, mels.shape[1], -1),
        quantized_code=batch["codes"],
        time_step=time,
        apply_cfg=False,
    )
    return (velocity - (mels - noise)).square().mean()
