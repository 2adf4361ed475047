"""Validates a client's request and converts it into the thinker's."""

from typing import Any, Final

import msgspec

from gateway.dispatch.registry import StageRegistry
from gateway.input.json_schema import require_feasible
from gateway.input.prompt import PromptBuilder
from omnirelay.content import ChatMessage, MediaPart, parts_of
from omnirelay.errors import (
    EmptyPromptError,
    InvalidRequestError,
    PromptTooLongError,
    UnknownSpeakerError,
    UnsupportedError,
)
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from shared.config import GatewayConfig
from shared.config.gateway import AUTO, READ_PROMPT
from shared.messages import STAGES, StageName, ThinkRequest

MAX_TEXT_CHARACTERS: Final = 4 * 2**20
"""Of a conversation: more than any prompt holds, and feasible to tokenize."""
SEED_BITS: Final = 32
"""Of generated seeds: short enough to be typed."""


class Validator:
    """Checks requests against the limits of gateway, stages and checkpoint."""

    def __init__(self, config: GatewayConfig, registry: StageRegistry, prompts: PromptBuilder) -> None:
        self._limits = config.limits
        self._family = family = prompts.family
        asked, aliases = config.speech_system_prompt, config.voice_aliases
        self.speech_system_prompt: Final = family.speech_system_prompt if asked == AUTO else asked
        self._aliases = family.voice_aliases if aliases is None else aliases
        self._registry = registry
        self._prompts = prompts

    def check_stages(self, request: GenerateRequest) -> None:
        """Reject a request whose stages are not ready, or that asks for speech from a text-only gateway."""
        if request.speech and request.stop:
            problem = "stop is for answers in text only: what is spoken cannot be taken back"
            raise UnsupportedError(problem, "stop")
        if request.say is not None and not request.speech:
            raise InvalidRequestError("say: only an answer with speech can be given its text", "say")
        if request.speech and "talker" not in self._registry.stages:
            advice = "it cannot speak"
            if request.say is None:
                how = '`omnirelay chat --text-only`, speech=False in Python, modalities ["text"] over HTTP'
                advice = f"request an answer without speech: {how}"
            raise InvalidRequestError(f"this gateway is text-only (text_only is set): {advice}")
        self._registry.require(STAGES if request.speech else STAGES[:1])

    def speaker(self, request: GenerateRequest) -> str | None:
        """The speaker of a request, none without speech; UnknownSpeakerError lists the known ones."""
        if not request.speech:
            return None
        known, asked = self._registry.speakers(), request.speaker
        if asked is None:
            return self._default_speaker(known)
        if (voice := _found(asked, known)) is not None:
            return voice
        if known and asked not in self._aliases:
            aliases = f" (and the aliases {', '.join(self._aliases)})" if self._aliases else ""
            raise UnknownSpeakerError(
                f"there is no speaker {asked[:128]!r}; this checkpoint has {', '.join(known)}{aliases}"
            )
        return self.voice_aliases().get(asked, asked)

    def voice_aliases(self) -> dict[str, str]:
        """The speaker of each alias; the default one for an alias of a speaker that the checkpoint lacks."""
        known = self._registry.speakers()
        default = self._default_speaker(known)
        return {
            alias: (_found(voice, known) or default) if known else voice
            for alias, voice in self._aliases.items()
            if _found(alias, known) is None
        }

    def _default_speaker(self, known: list[str]) -> str:
        default = self._family.default_speaker
        return _found(default, known) or (known[0] if known else default)

    def prompt(self, request: GenerateRequest) -> list[int]:
        """Build the prompt's token ids, slowly if it is long; InvalidRequestError tells what is wrong."""
        if request.prompt_token_ids is not None:
            return self._given_prompt(request)
        if request.prompt_text is not None:
            return self._text_prompt(request, request.prompt_text)
        messages = list(request.messages)
        # Instructions alone are answered, too: an agent greets that way.
        asked = [message for message in messages if message.role != "system"]
        if not asked and request.say is not None:
            asked = [ChatMessage("user", READ_PROMPT)]
            messages += asked
        asked = asked or messages
        parts = [part for message in asked for part in parts_of(message)]
        if not any(isinstance(part, MediaPart) or part.text.strip() for part in parts):
            raise EmptyPromptError("the prompt has no text, audio, image or video")
        prompt = self.speech_system_prompt
        if request.speech and prompt is not None and all(each.role != "system" for each in messages):
            messages.insert(0, ChatMessage("system", prompt))
        parts = [part for message in messages for part in parts_of(message)]
        length = sum(len(part.text) for part in parts if not isinstance(part, MediaPart))
        if length > MAX_TEXT_CHARACTERS:
            raise PromptTooLongError(
                f"the prompt has {length} characters of text, at most {MAX_TEXT_CHARACTERS} are allowed"
            )
        self._check_tokens("".join(part.text for part in parts if not isinstance(part, MediaPart)))
        return self._prompts.build(messages)

    def said(self, request: GenerateRequest, most: int) -> list[int]:
        """The token ids of the text that is spoken as it is; ``most`` are allowed."""
        text = request.say or ""
        if not text.strip():
            raise EmptyPromptError("the text to be spoken is empty", "say")
        ids = self._prompts.answer(text)
        if len(ids) > most:
            raise PromptTooLongError(
                f"say: the text has {len(ids)} tokens, at most {most} are spoken at once"
            )
        return ids

    def think_request(
        self,
        request_id: str,
        request: GenerateRequest,
        prompt: list[int],
        speaker: str | None,
        drawn_seed: int,
    ) -> ThinkRequest:
        """Build the thinker's request, without media; ``drawn_seed`` is for requests without a seed.

        Raises:
            PromptTooLongError: It exceeds a stage's context.
            InvalidRequestError: Names the value that is out of range.
        """
        self._check_length(len(prompt), request.speech)
        if request.chunk_frames and not request.streaming:
            raise InvalidRequestError("chunk_frames needs streaming: true", "chunk_frames")
        seed = drawn_seed if request.seed is None else request.seed
        fields = {
            "type": "think",
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "sampling": self._text_sampling(request.text_sampling, len(prompt)),
            "seed": seed,
            "priority": request.priority,
            # Checked without speech too: a value out of range is an error in either case.
            "speech": {
                "speaker": speaker or self._family.default_speaker,
                "sampling": self._codec_sampling(request, len(prompt)),
                "seed": seed,
                "streaming": request.streaming,
                "chunk_frames": request.chunk_frames,
            },
            "use_audio_in_video": request.use_audio_in_video,
        }
        try:
            think = msgspec.convert(fields, ThinkRequest)
        except msgspec.ValidationError as error:
            raise _invalid(error) from error
        return think if request.speech else msgspec.structs.replace(think, speech=None)

    def deadline_s(self, request: GenerateRequest) -> float:
        """The request's time limit in seconds; InvalidRequestError if it is not positive."""
        if request.deadline_s is None:
            return self._limits.deadline_s
        if not request.deadline_s > 0:
            raise InvalidRequestError(f"deadline_s must be positive, not {request.deadline_s}", "deadline_s")
        return min(request.deadline_s, self._limits.deadline_s)

    def _given_prompt(self, request: GenerateRequest) -> list[int]:
        prompt = request.prompt_token_ids or []
        if request.messages:
            raise InvalidRequestError("give either messages or prompt_token_ids, not both", "messages")
        if not prompt:
            raise EmptyPromptError("the prompt has no tokens", "prompt_token_ids")
        if not 0 <= min(prompt) <= max(prompt) < self._prompts.vocab_size:
            raise InvalidRequestError(
                f"prompt_token_ids must be from 0 to {self._prompts.vocab_size - 1}, "
                f"not {min(prompt)} to {max(prompt)}",
                "prompt_token_ids",
            )
        placeholders = self._prompts.placeholders
        if kinds := sorted({placeholders[each] for each in prompt if each in placeholders}):
            raise InvalidRequestError(
                f"prompt_token_ids contain the placeholder of {', '.join(kinds)}: "
                "send media as parts of messages",
                "prompt_token_ids",
            )
        return prompt

    def _text_prompt(self, request: GenerateRequest, text: str) -> list[int]:
        if request.messages:
            raise InvalidRequestError("give either messages or prompt_text, not both", "messages")
        if not text:
            raise EmptyPromptError("the prompt has no text", "prompt_text")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, at most {MAX_TEXT_CHARACTERS} are allowed"
            )
        self._check_tokens(text)
        return self._prompts.encode(text)

    def _check_tokens(self, text: str) -> None:
        """Refuse a text whose beginning is too long by far: all others wait while a text is tokenized."""
        most, size = self._limits.max_prompt_tokens, 2 * self._limits.max_prompt_tokens
        while size < len(text):
            if (found := len(self._prompts.encode(text[:size]))) > 2 * most:
                raise PromptTooLongError(f"the prompt has {found} tokens or more, this gateway takes {most}")
            size *= 4

    def _check_length(self, length: int, speech: bool) -> None:
        talker = self._room("talker", self._registry.codec().start_positions + 1) if speech else None
        for most, who in (
            (self._limits.max_prompt_tokens, "this gateway takes"),
            (self._room("thinker", 1), "the thinker can take"),
            (talker, "the talker can take"),
        ):
            if most is not None and length > most:
                raise PromptTooLongError(f"the prompt has {length} tokens, {who} at most {max(most, 0)}")

    def _room(self, stage: StageName, used: int) -> int | None:
        """Positions of a stage beyond those used, if its limit is known."""
        positions = self._registry.max_positions(stage)
        return None if positions is None else positions - used

    def _text_sampling(self, changes: SamplingOverrides, prompt: int) -> dict[str, Any]:
        if changes.json_schema is not None:
            if changes.min_tokens:
                raise InvalidRequestError(
                    "the schema says where the answer ends: leave out min_tokens and ignore_eos",
                    "text_sampling.min_tokens",
                )
            require_feasible(changes.json_schema)
        room = self._room("thinker", prompt)
        return _merge("text_sampling", {}, changes, self._limits.max_text_tokens, room)

    def _codec_sampling(self, request: GenerateRequest, prompt: int) -> dict[str, Any]:
        codec = self._registry.codec()
        room = self._room("talker", prompt + codec.start_positions) if request.speech else None
        defaults = msgspec.structs.asdict(codec.defaults)
        return _merge("codec_sampling", defaults, request.codec_sampling, self._limits.max_codec_tokens, room)


def _found(name: str, known: list[str]) -> str | None:
    """The speaker of a name, in any case."""
    return name if name in known else next((each for each in known if each.lower() == name.lower()), None)


def _merge(
    name: str, defaults: dict[str, Any], changes: SamplingOverrides, limit: int, room: int | None
) -> dict[str, Any]:
    """Merge a request's sampling parameters into the defaults, and clamp the number of tokens."""
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
    """Name the parameter as clients do, not as the thinker does."""
    problem, _, place = str(error).rstrip("`").partition(" - at `$.")
    for ours, theirs in (
        ("sampling.", "text_sampling."),
        ("speech.sampling.", "codec_sampling."),
        ("speech.chunk_frames", "chunk_frames"),
    ):
        if place.startswith(ours):
            place = theirs + place.removeprefix(ours)
    return InvalidRequestError(f"the request is not valid: {place}: {problem}", place)
