"""The same questions to transformers' own ``generate``, on the same checkpoint: the column beside."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import soundfile

from benchmarks.measure.oracle import keep_talker_mask
from benchmarks.quality.answers import MOST_CODES, MOST_WORDS, SpokenReply
from benchmarks.quality.requests import Asked
from omnirelay import AudioPart, ChatMessage, ImagePart
from omnirelay.content import parts_of
from shared.families.qwen2_5_omni import SPEECH_SYSTEM_PROMPT

_SAMPLES_A_CODE = 480


class Oracle:
    """``Qwen2_5OmniForConditionalGeneration`` with the weights of a checkpoint.

    Args:
        model: Its directory.
    """

    def __init__(self, model: Path) -> None:
        from shared.vllm.torchvision_compat import (  # noqa: PLC0415 - imports torch
            declare_missing_operators,
        )

        declare_missing_operators()
        import transformers  # noqa: PLC0415 - after the operators

        self._model = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(model).eval()
        self._processor = transformers.Qwen2_5OmniProcessor.from_pretrained(model)
        keep_talker_mask(self._model)
        _draw_only_codes(self._model)

    def answers(self, requests: Sequence[Asked]) -> list[SpokenReply]:
        """Answer one request after the other, text greedily and speech by the released defaults.

        It can read nothing aloud.
        """
        return [self._answer(asked) for asked in requests if not asked.is_read]

    def _answer(self, asked: Asked) -> SpokenReply:
        import torch  # noqa: PLC0415 - loaded by then

        inputs = self._inputs([ChatMessage("system", SPEECH_SYSTEM_PROMPT), *asked.messages])
        torch.manual_seed(asked.seed)
        # Nothing else of it is random: text is greedy.
        # transformers would hand pixels to the talker too, which refuses them.
        options = {
            f"thinker_{name}" if name.startswith("pixel_values") else name: value
            for name, value in inputs.items()
        }
        text, wave = self._model.generate(
            **options,
            speaker=asked.speaker,
            thinker_do_sample=False,
            thinker_max_new_tokens=MOST_WORDS,
            talker_max_new_tokens=MOST_CODES,
        )
        written = text[0, inputs["input_ids"].shape[1] :]
        said = self._processor.tokenizer.decode(written, skip_special_tokens=True).strip()
        samples = wave.reshape(-1).numpy()
        return SpokenReply(asked, said, samples, len(samples) < MOST_CODES * _SAMPLES_A_CODE)

    def _inputs(self, messages: Sequence[ChatMessage]) -> Any:
        from PIL import Image  # noqa: PLC0415 - as the others

        media = list(_media(messages))
        prompt = self._processor.apply_chat_template(
            [{"role": each.role, "content": list(_template_parts(each))} for each in messages],
            add_generation_prompt=True,
            tokenize=False,
        )
        return self._processor(
            text=prompt,
            images=[Image.open(io.BytesIO(part.data or b"")) for part in media if isinstance(part, ImagePart)]
            or None,
            audio=[_samples(part) for part in media if isinstance(part, AudioPart)] or None,
            return_tensors="pt",
        )


def _draw_only_codes(model: Any) -> None:
    """Keep the talker from ids that token2wav has no embedding of, as the server does."""
    codes = model.config.token2wav_config.dit_config.num_embeds + 1
    config = model.config.talker_config
    ends = {config.tts_codec_end_token_id, config.tts_codec_pad_token_id}
    others = [each for each in range(codes, config.vocab_size) if each not in ends]
    generate = model.talker.generate

    def drawing(**arguments: Any) -> Any:
        arguments["suppress_tokens"] = [*arguments["suppress_tokens"], *others]
        return generate(**arguments)

    model.talker.generate = drawing


def _media(messages: Sequence[ChatMessage]) -> Iterator[AudioPart | ImagePart]:
    for message in messages:
        for part in parts_of(message):
            if isinstance(part, AudioPart | ImagePart):
                yield part


def _template_parts(message: ChatMessage) -> Iterator[dict[str, str]]:
    for part in parts_of(message):
        if isinstance(part, AudioPart):
            yield {"type": "audio", "audio": ""}
        elif isinstance(part, ImagePart):
            yield {"type": "image", "image": ""}
        else:
            yield {"type": "text", "text": getattr(part, "text", "")}


def _samples(part: AudioPart) -> Any:
    samples, _ = soundfile.read(io.BytesIO(part.data or b""), dtype="float32")
    return samples
