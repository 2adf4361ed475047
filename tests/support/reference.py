"""transformers' own answer, the oracle of every parity test."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen2_5OmniForConditionalGeneration

from services.token2wav.noise import initial_noise


@dataclass(frozen=True)
class Answer:
    """What ``generate`` gives for one prompt."""

    text_ids: list[int]
    codec_ids: list[int]
    waveform: npt.NDArray[np.float32]


class Reference:
    """A checkpoint in transformers, greedy, in float32.

    Args:
        checkpoint: Its directory.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.model = Qwen2_5OmniForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval()

    def answer(
        self, prompt: list[int], speaker: str, *, max_tokens: int, max_codec_tokens: int, seed: int
    ) -> Answer:
        """Answer a prompt; token2wav starts from the noise that the seed gives."""
        ids = torch.tensor([prompt])
        captured: dict[str, torch.Tensor] = {}
        generate = self.model.talker.generate

        def capture(**arguments: Any) -> torch.Tensor:
            captured["codes"] = generate(**arguments)
            return captured["codes"]

        with mock.patch.object(self.model.talker, "generate", capture), seeded_noise(seed):
            sequence, waveform = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                speaker=speaker,
                thinker_max_new_tokens=max_tokens,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=max_codec_tokens,
            )
        ends = {self.model.talker.codec_eos_token, self.model.talker.codec_pad_token}
        codes = captured["codes"][0, len(prompt) + 2 :].tolist()
        return Answer(
            text_ids=sequence[0, len(prompt) :].tolist(),
            codec_ids=[code for code in codes if code not in ends],
            waveform=waveform.numpy(),
        )


@contextmanager
def seeded_noise(seed: int) -> Iterator[None]:
    """Let the reference start from our noise: it draws its own from an unseeded generator otherwise."""

    def randn(shape: list[int], **_: Any) -> torch.Tensor:
        return initial_noise(seed, *shape[1:]).unsqueeze(0)

    with mock.patch.object(torch, "randn", randn):
        yield
