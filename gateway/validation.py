"""A client's request to the thinker's: everything is checked before a stage hears of it."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from gateway.dispatch.registry import StageRegistry
from omnirelay.content import ChatMessage, MediaPart, parts_of
from omnirelay.errors import EmptyPromptError, InvalidRequestError, PromptTooLongError, UnknownSpeakerError
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from shared.config import GatewayConfig
from shared.messages import STAGES, MediaKind, StageName, ThinkRequest

DEFAULT_SPEAKER: Final = "Chelsie"
"""The released model's, if the checkpoint has it; else its first."""
CODEC_DEFAULTS: Final = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05}
TALKER_EXTRA_POSITIONS: Final = 2
"""Positions of the talker's prompt beyond the thinker's."""
MAX_TEXT_CHARACTERS: Final = 4 * 2**20
"""Of a whole conversation: more than any prompt holds, and little enough to be tokenized."""
SEED_BITS: Final = 32
"""Of seeds that the gateway draws: short enough to be typed again."""


class Prompts(Protocol):
    """What makes prompts, see :class:`gateway.input.prompt.PromptBuilder`."""

    @property
    def vocab_size(self) -> int:
        """Every token id is smaller."""
        ...

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """The tokens that stand for a sound, picture or video."""
        ...

    def build(self, messages: list[ChatMessage]) -> list[int]:
        """Give the prompt of a conversation."""
        ...


def stages_for(request: GenerateRequest) -> tuple[StageName, ...]:
    """The stages that a request needs."""
    return STAGES if request.speech else STAGES[:1]


class Validator:
    """Checks requests against the limits of the gateway, the stages and the checkpoint.

    Args:
        config: The gateway's.
        registry: What the stages have told of theirs.
        prompts: Makes prompts.
    """

    def __init__(self, config: GatewayConfig, registry: StageRegistry, prompts: Prompts) -> None:
        self._limits = config.limits
        self._speech_system_prompt = config.speech_system_prompt
        self._registry = registry
        self._prompts = prompts

    def check_stages(self, request: GenerateRequest) -> None:
        """Refuse a request whose stages are not there.

        Raises:
            StageUnavailableError: Naming them.
            InvalidRequestError: It asks for speech, and this gateway has none.
        """
        if request.speech and "talker" not in self._registry.stages:
            raise InvalidRequestError(
                "this gateway gives text only (text_only is set): ask for an answer without speech"
            )
        self._registry.require(stages_for(request))

    def speaker(self, request: GenerateRequest) -> str | None:
        """Give the voice of a request; none without speech.

        Raises:
            UnknownSpeakerError: Listing the known ones.
        """
        if not request.speech:
            return None
        known = self._registry.speakers()
        if request.speaker is None:
            return DEFAULT_SPEAKER if DEFAULT_SPEAKER in known or not known else known[0]
        if known and request.speaker not in known:
            raise UnknownSpeakerError(
                f"there is no speaker {request.speaker[:128]!r}; this checkpoint has {', '.join(known)}"
            )
        return request.speaker

    def prompt(self, request: GenerateRequest) -> list[int]:
        """Give the token ids of a request's prompt; takes long for a long one.

        Raises:
            EmptyPromptError: There is none.
            PromptTooLongError: It has more characters than could ever be tokens.
            InvalidRequestError: It is not one.
        """
        if request.prompt_token_ids is not None:
            return self._given_prompt(request)
        asked = [message for message in request.messages if message.role != "system"]
        if not any(_has_content(message) for message in asked):
            raise EmptyPromptError("the prompt holds no text, and no sound, picture or video")
        messages = self._with_system_message(request)
        length = sum(_characters(message) for message in messages)
        if length > MAX_TEXT_CHARACTERS:
            raise PromptTooLongError(
                f"the prompt has {length} characters of text, at most {MAX_TEXT_CHARACTERS} are taken"
            )
        return self._prompts.build(messages)

    def think_request(
        self,
        request_id: str,
        request: GenerateRequest,
        prompt: list[int],
        speaker: str | None,
        drawn_seed: int,
    ) -> ThinkRequest:
        """Give what the thinker is asked.

        Args:
            request_id: The gateway's name of the request.
            request: The client's.
            prompt: Its token ids.
            speaker: As :meth:`speaker` gave it.
            drawn_seed: Used if the request has none.

        Raises:
            PromptTooLongError: With the numbers.
            InvalidRequestError: Naming the value that is out of range.
        """
        self._check_length(len(prompt), request.speech)
        seed = drawn_seed if request.seed is None else request.seed
        # Checked without speech too: a value out of range is an error in either case.
        speech: dict[str, Any] = {
            "speaker": speaker or DEFAULT_SPEAKER,
            "sampling": self._codec_sampling(request, len(prompt)),
            "seed": seed,
            "streaming": request.streaming,
        }
        fields = {
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "sampling": self._text_sampling(request.text_sampling, len(prompt)),
            "seed": seed,
            "priority": request.priority,
            "speech": speech,
            "use_audio_in_video": request.use_audio_in_video,
        }
        try:
            think = msgspec.convert({"type": "think", **fields}, ThinkRequest)
        except msgspec.ValidationError as error:
            raise _invalid(error) from error
        return think if request.speech else msgspec.structs.replace(think, speech=None)

    def deadline_s(self, request: GenerateRequest) -> float:
        """Give the seconds that a request may take.

        Raises:
            InvalidRequestError: It asks for none, or less.
        """
        if request.deadline_s is None:
            return self._limits.deadline_s
        if not request.deadline_s > 0:
            raise InvalidRequestError(f"deadline_s must be positive, not {request.deadline_s}", "deadline_s")
        return min(request.deadline_s, self._limits.deadline_s)

    def _with_system_message(self, request: GenerateRequest) -> list[ChatMessage]:
        """Give the messages of a request, with the system message for speech if it speaks and brings none."""
        text = self._speech_system_prompt
        if not request.speech or text is None or any(each.role == "system" for each in request.messages):
            return request.messages
        return [ChatMessage("system", text), *request.messages]

    def _given_prompt(self, request: GenerateRequest) -> list[int]:
        prompt = request.prompt_token_ids or []
        if request.messages:
            raise InvalidRequestError("give either messages or prompt_token_ids, not both", "messages")
        if not prompt:
            raise EmptyPromptError("the prompt holds no tokens", "prompt_token_ids")
        if not 0 <= min(prompt) <= max(prompt) < self._prompts.vocab_size:
            raise InvalidRequestError(
                f"prompt_token_ids must be from 0 to {self._prompts.vocab_size - 1}, "
                f"not {min(prompt)} to {max(prompt)}",
                "prompt_token_ids",
            )
        if kinds := {
            self._prompts.placeholders[each] for each in prompt if each in self._prompts.placeholders
        }:
            raise InvalidRequestError(
                f"prompt_token_ids hold the placeholder of {', '.join(sorted(kinds))}: "
                "sounds, pictures and videos are given as parts of messages",
                "prompt_token_ids",
            )
        return prompt

    def _check_length(self, length: int, speech: bool) -> None:
        bounds: list[tuple[int | None, str]] = [
            (self._limits.max_prompt_tokens, "this gateway takes"),
            (self._room("thinker", 1), "the thinker can take"),
        ]
        if speech:
            bounds.append((self._room("talker", TALKER_EXTRA_POSITIONS + 1), "the talker can take"))
        for most, who in bounds:
            if most is not None and length > most:
                raise PromptTooLongError(f"the prompt has {length} tokens, {who} at most {max(most, 0)}")

    def _room(self, stage: StageName, used: int) -> int | None:
        """Positions of a stage beyond those used; none if the stage names no limit."""
        positions = self._registry.max_positions(stage)
        return None if positions is None else positions - used

    def _text_sampling(self, changes: SamplingOverrides, prompt: int) -> dict[str, Any]:
        room = self._room("thinker", prompt)
        return _merge("text_sampling", {}, changes, self._limits.max_text_tokens, room)

    def _codec_sampling(self, request: GenerateRequest, prompt: int) -> dict[str, Any]:
        room = self._room("talker", prompt + TALKER_EXTRA_POSITIONS) if request.speech else None
        return _merge(
            "codec_sampling", CODEC_DEFAULTS, request.codec_sampling, self._limits.max_codec_tokens, room
        )


def _merge(
    name: str, defaults: dict[str, Any], changes: SamplingOverrides, limit: int, room: int | None
) -> dict[str, Any]:
    """Apply a request's changes to the defaults, and fit the number of tokens to what is possible."""
    wanted = {name: value for name, value in msgspec.structs.asdict(changes).items() if value is not None}
    merged = {"max_tokens": limit, **defaults, **wanted}
    if changes.max_tokens is not None and (changes.min_tokens or 0) > changes.max_tokens:
        raise InvalidRequestError(
            f"min_tokens {changes.min_tokens} is more than max_tokens {changes.max_tokens}",
            f"{name}.min_tokens",
        )
    merged["max_tokens"] = min(merged["max_tokens"], limit, limit if room is None else room)
    if changes.min_tokens is not None:
        merged["min_tokens"] = min(changes.min_tokens, merged["max_tokens"])
    return merged


def _invalid(error: msgspec.ValidationError) -> InvalidRequestError:
    """Say what is out of range by the client's name for it, not by the thinker's."""
    problem, _, place = str(error).rstrip("`").partition(" - at `$.")
    for ours, theirs in (("sampling.", "text_sampling."), ("speech.sampling.", "codec_sampling.")):
        if place.startswith(ours):
            place = theirs + place.removeprefix(ours)
    return InvalidRequestError(f"the request is not valid: {place}: {problem}", place)


def _has_content(message: ChatMessage) -> bool:
    return any(isinstance(part, MediaPart) or part.text.strip() for part in parts_of(message))


def _characters(message: ChatMessage) -> int:
    return sum(len(part.text) for part in parts_of(message) if not isinstance(part, MediaPart))
