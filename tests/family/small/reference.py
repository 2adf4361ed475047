"""The small family in plain PyTorch: random weights, a checkpoint of them, and what they answer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.family.small.config import (
    CODE_DIM,
    CODES,
    END,
    HIDDEN,
    INNER_LAYER,
    MASK,
    SAMPLES_PER_FRAME,
    VOICES,
    SmallOmniConfig,
    decoder_values,
)


@dataclass(frozen=True)
class Answer:
    """What the model answers to a prompt.

    Attributes:
        text: Token ids.
        codes: Both ids of each frame, frame by frame.
        samples: Of the speech.
    """

    text: list[int]
    codes: list[int]
    samples: torch.Tensor


class SmallReference:
    """The model, computed from the start for each token.

    Args:
        vocabulary: The thinker's tokens.
        seed: Of the weights.
    """

    def __init__(self, vocabulary: int, seed: int = 5) -> None:
        self._vocabulary = vocabulary
        torch.manual_seed(seed)
        self.thinker: Any = Qwen2ForCausalLM(SmallOmniConfig(**decoder_values(vocabulary))).eval()
        talker = Qwen2ForCausalLM(Qwen2Config(**decoder_values(MASK + 1))).eval()
        self.talker: Any = nn.ModuleDict(
            {
                "model": talker.model,
                "head": talker.lm_head,
                "project": nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
                "further_embed": nn.Embedding(CODES, HIDDEN),
                "further_head": nn.Linear(HIDDEN, CODES, bias=False),
            }
        )
        self.vocoder: Any = nn.ModuleDict(
            {
                "first": nn.Embedding(CODES, CODE_DIM),
                "second": nn.Embedding(CODES, CODE_DIM),
                "voice": nn.Embedding(len(VOICES), CODE_DIM),
                "wave": nn.Linear(2 * CODE_DIM, SAMPLES_PER_FRAME),
            }
        )
        for module in (self.thinker, self.talker, self.vocoder):
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    # So large that the most likely token is so by a margin that no rounding turns.
                    nn.init.normal_(parameter, std=1.5 / parameter.shape[1] ** 0.5)

    def write(self, directory: Path) -> None:
        """Write the checkpoint, without a tokenizer."""
        parts = {"thinker": self.thinker, "talker": self.talker, "vocoder": self.vocoder}
        tensors = {
            f"{part}.{name}": tensor.detach().clone()
            for part, module in parts.items()
            for name, tensor in module.state_dict().items()
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config: dict[str, Any] = {
            "model_type": "small_omni",
            "architectures": ["SmallOmni"],
            "dtype": "float32",
            **decoder_values(self._vocabulary),
            "talker": decoder_values(MASK + 1),
        }
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")

    @torch.inference_mode()
    def answer(self, prompt: list[int], voice: str, tokens: int, frames: int) -> Answer:
        """What the model answers, greedily."""
        text = self._reply(prompt, tokens)
        codes = self._speak(self._rows([*prompt, *text[:-1]]), len(prompt), voice, frames)
        return Answer(text, codes.flatten().tolist(), self._sound(codes, voice))

    def _reply(self, prompt: list[int], tokens: int) -> list[int]:
        reply: list[int] = []
        while len(reply) < tokens and self.thinker.config.eos_token_id not in reply:
            logits = self.thinker(input_ids=torch.tensor([[*prompt, *reply]])).logits
            reply.append(int(logits[0, -1].argmax()))
        return reply

    def _rows(self, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens])
        hidden = self.thinker.model(input_ids=ids, output_hidden_states=True).hidden_states[INNER_LAYER][0]
        return torch.cat([self.thinker.model.embed_tokens(ids[0]), hidden], dim=-1)

    def _lone(self, token: int) -> torch.Tensor:
        """The row of a token that the thinker has not computed."""
        embed = self.thinker.model.embed_tokens(torch.tensor([token]))
        return torch.cat([embed, torch.zeros_like(embed)], dim=-1)

    def _speak(self, rows: torch.Tensor, prompt: int, voice: str, most: int) -> torch.Tensor:
        """Frames ``[n, 2]``."""
        parts = [rows[:prompt], self._lone(VOICES[voice]), rows[prompt:]]
        closing = self._lone(int(self.thinker.config.eos_token_id))
        track = torch.cat([*parts, closing.expand(most, -1)])
        conditions = self.talker["project"](track)
        inputs = conditions[: prompt + 1]
        frames: list[list[int]] = []
        embed = self.talker["model"].embed_tokens
        while len(frames) < most:
            hidden = self.talker["model"](inputs_embeds=inputs.unsqueeze(0)).last_hidden_state[0, -1:]
            first = self.talker["head"](hidden)[:, :MASK].argmax(-1)
            if int(first) == END:
                break
            second = self.talker["further_head"](hidden + embed(first)).argmax(-1)
            frames.append([int(first), int(second)])
            spoken = embed(first) + self.talker["further_embed"](second)
            inputs = torch.cat([inputs, conditions[len(inputs) : len(inputs) + 1] + spoken])
        return torch.tensor(frames, dtype=torch.int64).view(-1, 2)

    def _sound(self, codes: torch.Tensor, voice: str) -> torch.Tensor:
        part = self.vocoder
        spoken_by = torch.tensor(list(VOICES).index(voice))
        frames = part["first"](codes[:, 0]) + part["second"](codes[:, 1]) + part["voice"](spoken_by)
        before = torch.zeros(1, CODE_DIM)
        samples = []
        for frame in frames:
            samples.append(torch.tanh(part["wave"](torch.cat([before[0], frame]))))
            before = frame.unsqueeze(0)
        return torch.cat(samples) if samples else torch.empty(0)
