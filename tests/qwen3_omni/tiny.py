"""What transformers answers with the tiny random checkpoint of Qwen3-Omni."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from checkpoint.qwen3_omni import TINY
from checkpoint.tokenizer import build_tokenizer, role_ids

GROUPS, CODES = TINY.groups, TINY.codes
IM_START, IM_END = TINY.special_ids["<|im_start|>"], TINY.special_ids["<|im_end|>"]
PAD, TEXT_BEGIN, TEXT_END = (TINY.special_ids[f"<tts_{name}>"] for name in ("pad", "text_bos", "text_eod"))
SYSTEM, USER, ASSISTANT = role_ids(build_tokenizer(TINY.trained, TINY.special_ids)).values()


def prompt_of(*words: int, system: int = 0) -> list[int]:
    """A conversation: perhaps a system's turn, a user's, and the beginning of the assistant's."""
    before = [IM_START, SYSTEM, 10, *range(30, 30 + system), IM_END, 10] if system else []
    return [*before, IM_START, USER, 10, *words, IM_END, 10, IM_START, ASSISTANT, 10]


class Spoken(NamedTuple):
    """What transformers' talker is given, and says.

    Attributes:
        rows: ``[positions, hidden]`` of text and media: those of its prompt, then those of each further
            frame; the last one repeats.
        prompt_rows: How many stand before the nine start positions.
        frames: Codec ids ``[frames, groups]``; the end's frame is not spoken.
        ended: It said the end, and was not cut.
        prompt: Token ids of what it answers, placeholders expanded.
        text: Token ids of the reply that it says.
        samples: All of its speech.
        positions: M-RoPE ids int64 ``[3, positions]`` of the rows.
    """

    rows: torch.Tensor
    prompt_rows: int
    frames: list[list[int]]
    ended: bool
    prompt: list[int]
    text: list[int]
    samples: torch.Tensor
    positions: torch.Tensor


class Reference:
    """``Qwen3OmniMoeForConditionalGeneration`` with a checkpoint's weights, asked greedily."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
        # Without it ``generate`` raises where a spoken prompt has both sound and pictures.
        self.model.config.talker_config.audio_config = self.model.config.thinker_config.audio_config

    def text(self, prompt: list[int], tokens: int) -> list[int]:
        """The ids of a reply of so many tokens."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            sequence = self.model.thinker.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        reply: list[int] = sequence[0, len(prompt) :].tolist()
        return reply

    def speak(
        self,
        prompt: list[int],
        speaker: str,
        text_tokens: int,
        frames: int,
        end: int | None = None,
        **inputs: Any,
    ) -> Spoken:
        """What it says to a prompt, after a reply of so many tokens, or up to a token that is to end it.

        ``inputs`` are what a processor makes of media.  Of sound in videos the talker is told too, which
        ``generate`` does not do by itself: it would place their tokens as if they were text.
        """
        given: dict[str, Any] = {}
        talker = self.model.talker
        generate = talker.generate

        def listen(**arguments: Any) -> Any:
            given.update(arguments)
            given["result"] = generate(**arguments)
            return given["result"]

        ids = torch.tensor([prompt])
        heard = inputs.get("use_audio_in_video", False)
        with torch.inference_mode(), mock.patch.object(talker, "generate", listen):
            sequence, samples = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                thinker_eos_token_id=self.model.config.im_end_token_id if end is None else end,
                talker_use_audio_in_video=heard,
                speaker=speaker,
                thinker_max_new_tokens=text_tokens,
                thinker_min_new_tokens=text_tokens if end is None else 1,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=frames,
                **inputs,
            )
            codec = self.model.config.talker_config
            special = [
                codec.codec_nothink_id,
                codec.codec_think_bos_id,
                codec.codec_think_eos_id,
                codec.speaker_id[speaker],
                codec.codec_pad_id,
                codec.codec_bos_id,
            ]
            start = given["inputs_embeds"][0].clone()
            start[-6:] -= talker.get_input_embeddings()(torch.tensor(special))
            told = ("image_grid_thw", "video_grid_thw", "audio_feature_lengths", "video_second_per_grid")
            grids, videos, sounds, seconds = (given.get(name) for name in told)
            ids, delta = talker.get_rope_index(
                given["talker_input_ids"], grids, videos, given["attention_mask"], heard, sounds, seconds
            )
            rows = torch.cat([start, given["trailing_text_hidden"][0], given["tts_pad_embed"][0]])
        behind = torch.arange(start.shape[0], rows.shape[0]) + delta[0]
        codes = given["result"].sequences[0].tolist()
        residual = [step[-1] for step in given["result"].hidden_states if step[-1] is not None]
        spoken = torch.stack(residual, dim=1)[0].tolist() if residual else []
        return Spoken(
            rows,
            start.shape[0] - 9,
            spoken,
            codes[-1] == codec.codec_eos_token_id,
            prompt,
            sequence[0, len(prompt) :].tolist(),
            samples.flatten(),
            torch.cat([ids[:, 0], behind.expand(3, -1)], dim=1).to(torch.int64),
        )
