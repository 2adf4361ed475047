"""transformers' own answers: what the thinker says, what the talker is given and says, how it sounds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Qwen2_5OmniForConditionalGeneration

from benchmarks.measure.oracle import keep_talker_mask
from services.families.qwen2_5_omni.token2wav.noise import initial_noise

CODEC_ENDS = (8292, 8294)
"""transformers' default for ``talker_eos_token_id``."""


@dataclass(frozen=True)
class Answer:
    """One prompt's answer.

    Attributes:
        prompt: Token ids.
        text: Token ids of the reply, the end token included.
        rows: ``[positions, hidden]``, the rows that the talker is given: those of its prompt, then those
            that are added while it talks.
        positions: int64 ``[3, positions]``, the rows' position ids.
        codes: Codec ids, without the end token.
        ended: The codes ended by an end token, not because there were enough.
    """

    prompt: list[int]
    text: list[int]
    rows: torch.Tensor
    positions: torch.Tensor
    codes: list[int]
    ended: bool

    @property
    def prompt_positions(self) -> int:
        """Positions of the talker's prompt."""
        return len(self.prompt) + 2


class Reference:
    """``Qwen2_5OmniForConditionalGeneration`` with a checkpoint's weights, asked greedily.

    Its talker keeps its attention mask, as the released weights were trained (``benchmarks.measure.oracle``).

    Attributes:
        undrawable: Codec ids that it may not draw, besides the start token, which ``generate`` suppresses.
    """

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = Qwen2_5OmniForConditionalGeneration.from_pretrained(directory, dtype=dtype).eval()
        keep_talker_mask(self.model)
        self.undrawable: list[int] = []
        self._answers: dict[str, Answer] = {}

    def answer(self, prompt: list[int], *, speaker: str = "Ethan", **options: Any) -> Answer:
        """What transformers answers to one prompt, without padding."""
        key = repr((prompt, speaker, sorted(options.items())))
        if key not in self._answers:
            ids = torch.tensor([prompt])
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            self._answers[key] = self.answers_to(inputs, speaker=speaker, **options)[0]
        return self._answers[key]

    def answers_to(
        self,
        inputs: dict[str, torch.Tensor],
        *,
        speaker: str = "Ethan",
        use_audio_in_video: bool = False,
        **options: Any,
    ) -> list[Answer]:
        """What it answers to a processor's inputs, one conversation or a batch."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        # transformers' generate would hand pixels to the talker too, which refuses them.
        media = {
            f"thinker_{name}" if name.startswith("pixel_values") else name: value
            for name, value in inputs.items()
            if name not in ("input_ids", "attention_mask")
        }
        options |= media | {"use_audio_in_video": use_audio_in_video}
        return self._generate(ids, mask, speaker, options)

    def text(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The reply's token ids alone."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            sequence = self.model.thinker.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
        reply: list[int] = sequence[0, len(prompt) :].tolist()
        return reply

    def waveform(self, codes: list[int], *, speaker: str, seed: int) -> torch.Tensor:
        """The codes as sound, float32 ``[samples]``, from the noise that the seed gives.

        transformers draws its own noise from an unseeded generator.
        """

        def randn(shape: list[int], **_: Any) -> torch.Tensor:
            return initial_noise(seed, *shape[1:]).unsqueeze(0)

        voice = self.model.speaker_map[speaker]
        with torch.inference_mode(), mock.patch.object(torch, "randn", randn):
            sound: torch.Tensor = self.model.token2wav(
                torch.tensor([codes]), conditioning=voice["cond"], reference_mel=voice["ref_mel"]
            )
        return sound.reshape(-1)

    def _generate(
        self, ids: torch.Tensor, mask: torch.Tensor, speaker: str, options: dict[str, Any]
    ) -> list[Answer]:
        given: dict[str, torch.Tensor] = {}
        generate = self.model.talker.generate

        def listen(**arguments: Any) -> torch.Tensor:
            for name in ("inputs_embeds", "thinker_reply_part", "input_text_ids"):
                # The talker adds to its first argument in place.
                given[name] = arguments[name].clone()
            arguments["suppress_tokens"] = [*arguments["suppress_tokens"], *self.undrawable]
            codes: torch.Tensor = generate(**arguments)
            given["codes"] = codes[:, arguments["input_ids"].shape[1] :]
            return codes

        # The audio is token2wav's matter.
        silent = mock.patch.object(self.model.token2wav, "forward", return_value=torch.zeros(1))
        with torch.inference_mode(), mock.patch.object(self.model.talker, "generate", listen), silent:
            sequences, _ = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                speaker=speaker,
                thinker_do_sample=False,
                talker_do_sample=False,
                **options,
            )
        with_voice = torch.cat([mask, mask.new_ones(mask.shape[0], 2)], dim=1)
        audio_mask = options.get("feature_attention_mask")
        positions, _ = self.model.talker.get_rope_index(
            given["input_text_ids"],
            options.get("image_grid_thw"),
            options.get("video_grid_thw"),
            with_voice,
            options.get("use_audio_in_video", False),
            None if audio_mask is None else audio_mask.sum(dim=1),
            options.get("video_second_per_grid"),
        )
        return [self._one(row, ids, mask, sequences, positions[:, row], given) for row in range(ids.shape[0])]

    def _one(
        self,
        row: int,
        ids: torch.Tensor,
        mask: torch.Tensor,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        given: dict[str, torch.Tensor],
    ) -> Answer:
        padding = int((mask[row] == 0).sum())
        rows = torch.cat([given["inputs_embeds"][row, padding:], given["thinker_reply_part"][row]])
        prompt_positions = positions[:, padding:]
        following = torch.arange(given["thinker_reply_part"].shape[1]) + prompt_positions.max() + 1
        codes = given["codes"][row].tolist()
        end = next((index for index, code in enumerate(codes) if code in CODEC_ENDS), None)
        return Answer(
            prompt=ids[row, padding:].tolist(),
            text=sequences[row, ids.shape[1] :].tolist(),
            rows=rows,
            positions=torch.cat([prompt_positions, following.expand(3, -1)], dim=1),
            codes=codes if end is None else codes[:end],
            ended=end is not None,
        )


def random_prompt(length: int, seed: int = 0, vocabulary: int = 1536) -> list[int]:
    """Token ids of ordinary text."""
    generator = torch.Generator().manual_seed(seed * 10_007 + length)
    ids: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
    return ids
