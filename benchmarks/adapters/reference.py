"""``python -m benchmarks.adapters.reference MODEL`` answers requests.

They come as lines of JSON, each is answered with a line; a first line, empty, says that the model is loaded.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.measure.oracle import keep_talker_mask
from shared.checkpoints import read_config

_MODELS: Final = {
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request.

    Attributes:
        prompt: Token ids.
        speaker: The voice.
        text_tokens: Length of the text.
        codec_tokens: Length of the speech in frames.
        threads: Threads to compute with.
    """

    prompt: list[int]
    speaker: str
    text_tokens: int
    codec_tokens: int
    threads: int


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer.

    Attributes:
        text_ids: The text's token ids.
        codec_ids: The speech's codec ids.
        samples: Length of the waveform.
    """

    text_ids: list[int]
    codec_ids: list[int]
    samples: int


class Reference:
    """The model, which keeps the codec ids of its last answer.

    Args:
        model: Directory of the checkpoint.
    """

    def __init__(self, model: Path) -> None:
        from shared.vllm.torchvision_compat import declare_missing_operators  # noqa: PLC0415 - imports torch

        declare_missing_operators()
        import torch  # noqa: PLC0415 - after the threads are set
        import transformers  # noqa: PLC0415 - as above

        self._torch = torch
        kind = _MODELS[read_config(model)["model_type"]]
        self._model: Any = getattr(transformers, kind).from_pretrained(model, dtype="auto").eval()
        self._codes: Any = None
        self._keep_codes()
        # A frame more than is heard is drawn of several codebooks.
        self._unheard = int(hasattr(self._model, "code2wav"))
        if not self._unheard:
            keep_talker_mask(self._model)

    def answer(self, ask: Ask) -> Reply:
        """Answer a request greedily, with forced lengths."""
        if self._torch.get_num_threads() != ask.threads:
            self._torch.set_num_threads(ask.threads)
        prompt = self._torch.tensor([ask.prompt])
        sequences, samples = self._model.generate(
            input_ids=prompt,
            attention_mask=self._torch.ones_like(prompt),
            speaker=ask.speaker,
            thinker_do_sample=False,
            thinker_min_new_tokens=ask.text_tokens,
            thinker_max_new_tokens=ask.text_tokens,
            talker_do_sample=False,
            talker_min_new_tokens=ask.codec_tokens + self._unheard,
            talker_max_new_tokens=ask.codec_tokens + self._unheard,
        )
        return Reply(
            text_ids=sequences[0, prompt.shape[1] :].tolist(),
            codec_ids=self._heard(ask.codec_tokens),
            samples=samples.numel(),
        )

    def _heard(self, frames: int) -> list[int]:
        """The codec ids of the last answer."""
        if self._unheard:
            found = [state[-1][0] for state in self._codes.hidden_states if state[-1] is not None]
            return [code for frame in found for code in frame.tolist()]
        codes: list[int] = self._codes[0].tolist()[-frames:]
        return codes

    def _keep_codes(self) -> None:
        """Keep what the talker returns, which the model's ``generate`` does not give."""
        generate: Callable[..., Any] = self._model.talker.generate

        def keeping(*arguments: Any, **options: Any) -> Any:
            self._codes = generate(*arguments, **options)
            return self._codes

        self._model.talker.generate = keeping


def main(model: Path) -> None:
    """Answer until the input ends."""
    import transformers  # noqa: PLC0415 - whoever imports the messages does without

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Whatever a library prints must not stand among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    reference = Reference(model)
    answers.write(b"\n")
    for line in sys.stdin.buffer:
        ask = msgspec.json.decode(line, type=Ask)
        answers.write(msgspec.json.encode(reference.answer(ask)) + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
