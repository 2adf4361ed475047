"""What of a request an earlier attempt has done, and what is left to do."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from vllm.inputs import MultiModalInput, TokensInput

from omnirelay.errors import InvalidRequestError
from shared.messages import FinishReason, ResumedSpeech, ThinkRequest
from shared.stage.resume import check_resumed


class ReplayedPrompt(list[int]):
    """A prompt's tokens, and behind them those of its reply that are computed again."""

    def __init__(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        super().__init__([*prompt, *reply])
        self.prompt_tokens = len(prompt)


def prompt_length(tokens: Sequence[int]) -> int:
    """How many of a request's tokens, of the engine's input, are the prompt."""
    return tokens.prompt_tokens if isinstance(tokens, ReplayedPrompt) else len(tokens)


@dataclass(frozen=True)
class Progress:
    """How far a request has come; a new one has come nowhere."""

    text: list[int]  # Tokens of the reply, the end token included
    finish_reason: FinishReason | None  # Why the reply ended; none if more is to be drawn
    speech: ResumedSpeech | None  # What is there of its speech; none if there is nothing
    needs_rows: bool  # The talker still speaks, and wants to be told what

    @classmethod
    def of(cls, request: ThinkRequest) -> Self:
        """The progress that a request says it has made."""
        if request.early is not None:
            return cls(text=[], finish_reason="length", speech=None, needs_rows=False)
        speech = request.resume.speech if request.resume else None
        spoken = speech is not None and speech.finish_reason is not None
        return cls(
            text=request.resume.text_token_ids if request.resume else [],
            finish_reason=request.resume.finish_reason if request.resume else None,
            speech=speech,
            needs_rows=request.speech is not None and not spoken,
        )

    @property
    def needs_engine(self) -> bool:
        """Something is to be drawn, or to be computed for the talker."""
        return self.finish_reason is None or self.needs_rows

    @property
    def replayed_tokens(self) -> list[int]:
        """Tokens to compute again behind the prompt: the last of a reply that ended has no row."""
        return self.text if self.finish_reason is None else self.text[:-1]

    def check(self, request: ThinkRequest, most: int, end_tokens: Collection[int], vocabulary: int) -> None:
        """Raise InvalidRequestError, naming the field, at what no earlier attempt can have given."""
        check_resumed(
            "resume.text_token_ids",
            self.text,
            self.finish_reason,
            most=most,
            end_tokens=end_tokens,
            vocabulary=vocabulary,
            keeps_end=True,
        )
        if self.speech is None:
            return
        if request.speech is None:
            raise InvalidRequestError("resume.speech: an answer in text only has no speech")
        silent = self.finish_reason is not None and len(self.text) == 1
        if silent and self.speech.codec_token_ids:
            raise InvalidRequestError("resume.speech.codec_token_ids: a reply of one token is not spoken")

    def behind(self, prompt: TokensInput | MultiModalInput) -> TokensInput | MultiModalInput:
        """The engine's input: a prompt, and behind it what is to be computed again."""
        if self.replayed_tokens:
            prompt = prompt.copy()
            prompt["prompt_token_ids"] = ReplayedPrompt(prompt["prompt_token_ids"], self.replayed_tokens)
        return prompt
