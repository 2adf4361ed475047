"""Builds prompts as transformers does, but safe against injected special tokens.

The rendered chat template is tokenized as a whole. If a special token comes from a user's text (a typed
``<|im_end|>``), it is tokenized again such that only the template's special tokens count.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from gateway.input.detokenizer import Detokenizer, bytes_of
from omnirelay.content import ChatMessage, ContentPart, MediaPart, TextPart, media_of, parts_of
from omnirelay.errors import CheckpointError, InvalidRequestError, UnsupportedError
from shared.checkpoints import read_config, read_object
from shared.families import DESCRIPTIONS, Descriptions, family_of
from shared.messages import MediaKind
from shared.tokenizer import load_tokenizer

Span = tuple[int, int]
TEMPLATE_FILES: Final = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class PromptBuilder:
    """Builds prompts for one checkpoint, or raises CheckpointError.  Not thread-safe."""

    def __init__(self, directory: Path, families: Descriptions = DESCRIPTIONS) -> None:
        self.directory: Final = directory
        self._tokenizer = load_tokenizer(directory)
        self._template = _compile(_read_template(directory))
        config = read_config(directory)
        self.family: Final = family_of(config, families)
        self.vocab_size: Final = _vocab_size(config, self.family.vocabulary)
        special = {
            token_id: token.content
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._special_ids = frozenset(special)
        self._id_of = {content: token_id for token_id, content in special.items()}
        self.placeholders: Final[dict[int, MediaKind]] = {
            self._id_of[content]: kind
            for content, kind in self.family.placeholders.items()
            if content in self._id_of
        }
        longest_first = sorted(self._id_of, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def answer(self, text: str) -> list[int]:
        """The token ids of an answer of the model that has this text, its end included."""
        end = self._id_of.get(self.family.end_of_turn)
        if end is None:
            raise UnsupportedError(
                f"the checkpoint has no token {self.family.end_of_turn} to end a text", "say"
            )
        return [*self.encode(text), end]

    def detokenizer(self, stop: Sequence[str] = ()) -> Detokenizer:
        """A detokenizer for a new answer, which ends before a ``stop``."""
        return Detokenizer(self._tokenizer, self._special_ids, stop)

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no part in a text, as the one that ends it."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, or of a special one's name."""
        return bytes_of(self._tokenizer.id_to_token(token_id) or "")

    def build(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt of a conversation, up to the assistant's turn; each media item is one placeholder token.

        Raises:
            InvalidRequestError: The chat template rejects the conversation, or drops or reorders its media.
        """
        ids = self._encode(messages)
        given = [part.kind for _, part in media_of(messages)]
        kept = [self.placeholders[each] for each in ids if each in self.placeholders]
        if kept != given:
            raise InvalidRequestError(
                f"the checkpoint's chat template turns {_listed(given)} into {_listed(kept)}: "
                "it drops or moves media",
                "messages",
            )
        return ids

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, in which special tokens are ordinary text."""
        return self._encode_guarded(text, [(0, len(text))])

    def _encode(self, messages: Sequence[ChatMessage]) -> list[int]:
        prompt = self._render(messages)
        ids = self._tokenize(prompt)
        mark = f"mark{secrets.token_hex(16)}x"
        numbers = count()
        marked = self._render([_with_marks(message, mark, numbers) for message in messages])
        own = len(self._special_pattern.findall(marked))
        if sum(token_id in self._special_ids for token_id in ids) == own:
            return ids
        return self._encode_guarded(prompt, _user_spans(prompt, marked, mark, list(_texts(messages))))

    def _tokenize(self, text: str) -> list[int]:
        # Of the tokenizer's methods only those for batches let other threads run: a long text takes seconds.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _render(self, messages: Iterable[ChatMessage]) -> str:
        plain = [{"role": message.role, "content": _plain(message.content)} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError) as error:
            problem = f"the chat template rejects this conversation: {error}"
            raise InvalidRequestError(problem, "messages") from error

    def _encode_guarded(self, prompt: str, spans: Sequence[Span]) -> list[int]:
        """Tokenize with the user's special tokens as ordinary text.

        A tokenizer splits at special tokens first, so encoding the pieces between the template's own gives
        the same ids as the whole text.
        """
        ids: list[int] = []
        done = start = 0
        # With this flag the tokenizer treats special tokens as text.
        self._tokenizer.encode_special_tokens = True
        try:
            for user_start, user_end in [*spans, (len(prompt), len(prompt))]:
                for match in self._special_pattern.finditer(prompt, start, user_start):
                    ids += self._tokenize(prompt[done : match.start()])
                    ids.append(self._id_of[match[0]])
                    done = match.end()
                start = user_end
            ids += self._tokenize(prompt[done:])
        finally:
            self._tokenizer.encode_special_tokens = False
        return ids


def _plain(content: str | Sequence[ContentPart]) -> str | list[dict[str, str]]:
    """A message's content as chat templates expect it, without files."""
    if isinstance(content, str):
        return content
    return [
        {"type": part.kind} if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
        for part in content
    ]


def _texts(messages: Iterable[ChatMessage]) -> Iterator[str]:
    """The user's texts, in order."""
    for message in messages:
        yield from (part.text for part in parts_of(message) if not isinstance(part, MediaPart))


def _with_marks(message: ChatMessage, mark: str, numbers: Iterator[int]) -> ChatMessage:
    """The message with a numbered mark in place of each text."""
    if isinstance(message.content, str):
        return ChatMessage(message.role, f"{mark}{next(numbers)}x")
    marked = [
        part if isinstance(part, MediaPart) else TextPart(f"{mark}{next(numbers)}x")
        for part in message.content
    ]
    return ChatMessage(message.role, marked)


def _listed(kinds: Sequence[MediaKind]) -> str:
    return ", ".join(kinds[:8]) + (", …" if len(kinds) > 8 else "") or "nothing"


def _user_spans(prompt: str, marked: str, mark: str, texts: Sequence[str]) -> list[Span]:
    """Where the user's texts are in the prompt, found by comparison with the marked prompt."""
    pieces = re.split(f"{mark}([0-9]+)x", marked)
    spans: list[Span] = []
    rebuilt = pieces[0]
    for number, between in zip(pieces[1::2], pieces[2::2], strict=True):
        text = texts[int(number)]
        spans.append((len(rebuilt), len(rebuilt) + len(text)))
        rebuilt += text + between
    if rebuilt != prompt:
        # The template alters texts, so the origin of a special token is unknown.
        problem = "a message contains a special token as text, which is not allowed"
        raise InvalidRequestError(problem, "messages")
    return spans


def _vocab_size(config: dict[str, Any], keys: Sequence[str]) -> int:
    """Rows of the thinker's embedding table; a larger id would crash the thinker."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, int):
        raise CheckpointError(f"config.json lacks {'.'.join(keys)}")
    return value


def _read_template(directory: Path) -> str:
    jinja_file = directory / TEMPLATE_FILES[0]
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    for name in TEMPLATE_FILES[1:]:
        if (directory / name).is_file():
            template = read_object(directory / name).get("chat_template")
            if isinstance(template, str):
                return template
    raise CheckpointError(f"{directory} has a chat template in none of {', '.join(TEMPLATE_FILES)}")


def _compile(source: str) -> jinja2.Template:
    """Compile a chat template as transformers does, in a sandbox."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template is not valid: {error}") from error
