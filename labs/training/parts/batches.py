"""Dialogues as the thinker's input: through the checkpoint's own chat template, tokenizer and processors."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from labs.training.data.augmentation import RATE, Moments
from labs.training.data.dialogues import Dialogue, Turn
from labs.training.data.images import Scene
from labs.training.data.synthesis import Wave
from labs.training.parts.vocabulary import SYSTEM_PROMPT
from shared.families import SPEECH_SYSTEM_PROMPT

# Of silence, so that the last frame's window reaches into it, as in a longer padding.
_MARGIN = RATE // 10
_END = "<|im_end|>"
# By how often: the second is what the gateway puts before a request that speaks.
_SYSTEM_PROMPTS = {SYSTEM_PROMPT: 1, SPEECH_SYSTEM_PROMPT: 8, "Be brief.": 1}
_PLAIN = 0.6


@dataclass(frozen=True)
class Batch:
    """Inputs of the thinker, padded on the right.

    Attributes:
        inputs: what the processor gives.
        prompts: tokens of each prompt, its media included.
        replies: tokens of each reply, its end included; they follow the prompt.
        texts: each reply.
        spoken: the words of each recording.
        scenes: what each image shows.
        moments: of each audio token of each recording, as of :func:`augmentation.vary`.
    """

    inputs: dict[str, torch.Tensor]
    prompts: list[int]
    replies: list[int]
    texts: list[str]
    spoken: list[str]
    scenes: list[Scene]
    moments: list[torch.Tensor] = field(default_factory=list)

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the inputs on a device."""
        return {name: value.to(device) for name, value in self.inputs.items()}

    def audio(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the audio encoder's inputs on a device."""
        return {name: self.inputs[name].to(device) for name in ("input_features", "feature_attention_mask")}

    def images(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the image encoder's inputs on a device."""
        return {name: self.inputs[name].to(device) for name in ("pixel_values", "image_grid_thw")}


class Batcher:
    """Makes batches; audio is padded to its longest instead of the processor's own length, for speed."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(
        self,
        dialogues: Sequence[Dialogue],
        generator: random.Random,
        waves: Sequence[Wave] = (),
        moments: Sequence[Moments] = (),
        system: str | None = None,
    ) -> Batch:
        """Return a batch; ``waves`` and their ``moments`` are those of the spoken turns, in their order.

        Without a ``system`` prompt one is drawn for the whole batch: mixed lengths would cost padding.
        """
        images: list[Image.Image] = []
        prompts, texts, replies = [], [], []
        if system is None and generator.random() >= _PLAIN:
            system = generator.choices([*_SYSTEM_PROMPTS], [*_SYSTEM_PROMPTS.values()])[0]
        first = [] if system is None else [{"role": "system", "content": system}]
        for dialogue in dialogues:
            messages = [*first, *_messages(dialogue, images, generator)]
            prompt = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            reply = dialogue.turns[-1].reply + _END
            prompts.append(prompt)
            texts.append(prompt + reply)
            replies.append(len(self._processor.tokenizer(reply)["input_ids"]))
        self._pad_audio_to(max(map(len, waves), default=0) + _MARGIN)
        inputs = self._processor(
            text=texts,
            images=images or None,
            audio=list(waves) or None,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        lengths = inputs["attention_mask"].sum(-1).tolist()
        starts = [length - reply for length, reply in zip(lengths, replies, strict=True)]
        return Batch(
            dict(inputs),
            starts,
            replies,
            texts=[dialogue.turns[-1].reply for dialogue in dialogues],
            spoken=[turn.question for dialogue in dialogues for turn in dialogue.turns if turn.spoken],
            scenes=[
                turn.scene for dialogue in dialogues for turn in dialogue.turns if turn.scene is not None
            ],
            moments=[torch.from_numpy(each.copy()) for each in moments],
        )

    def _pad_audio_to(self, samples: int) -> None:
        features = self._processor.feature_extractor
        features.n_samples = samples
        features.nb_max_frames = samples // features.hop_length


def _messages(
    dialogue: Dialogue, images: list[Image.Image], generator: random.Random
) -> list[dict[str, Any]]:
    """Return the messages of a dialogue, without the last reply; its images are appended to ``images``."""
    messages: list[dict[str, Any]] = []
    for turn in dialogue.turns:
        messages.append({"role": "user", "content": _content(turn, images, generator)})
        messages.append({"role": "assistant", "content": turn.reply})
    return messages[:-1]


def _content(turn: Turn, images: list[Image.Image], generator: random.Random) -> list[dict[str, Any]]:
    asked = {"type": "audio", "audio": ""} if turn.spoken else {"type": "text", "text": turn.question}
    if turn.instruction:
        return [asked, {"type": "text", "text": turn.instruction}]
    if turn.scene is None:
        return [asked]
    images.append(turn.scene.draw(generator))
    shown = {"type": "image", "image": ""}
    return [shown, asked] if generator.random() < 0.7 else [asked, shown]
