"""The input of ``omnirelay batch``: one prompt a line, as a JSON object."""

import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from omnirelay import ChatMessage, GenerateRequest, SamplingOverrides, build_request
from omnirelay.errors import InvalidRequestError, OutputError, said

MAX_LINE_BYTES: Final = 2**27
"""Longest line."""
_URLS: Final = ("data:", "https:")
_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Valid ids; they name files too."""


class PromptTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class _Named(msgspec.Struct, frozen=True):
    """What is read of a line that is not a prompt."""

    id: str | None = None


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of the input.

    Attributes:
        id: Names the result and its file of speech; the line's number without it.
        text: The user's text.
        messages: A conversation, instead of ``text`` and files.
        system: System message.
        audio: Paths (relative to the input's folder) or ``https:`` URLs of audio that stands before the text.
        images: The same of images.
        videos: The same of videos.
        use_audio_in_video: Hear the videos' audio track too.
        speech: Answer with speech; with ``--text-only`` no line does.
        voice: The voice.
        speaker: The same.
        seed: Makes the answer repeatable.
        temperature: Of text and speech; 0 is greedy decoding.
        max_tokens: Most text tokens.
        max_codec_tokens: Most codec frames: 50 a second with Qwen2.5-Omni.
        say: A text that is spoken as it is, instead of an answer.
    """

    id: str | None = None
    text: str = ""
    messages: list[PromptTurn] | None = None
    system: str | None = None
    audio: list[str] = []
    images: list[str] = []
    videos: list[str] = []
    use_audio_in_video: bool = False
    speech: bool = True
    voice: str | None = None
    speaker: str | None = None
    seed: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    max_codec_tokens: int | None = None
    say: str | None = None


@dataclass(frozen=True)
class BatchJob:
    """A line of the input.

    Attributes:
        number: Of the line, from 1.
        id: Unique among the lines that are prompts.
        digest: SHA-256 of the line, so that a result of a changed line does not count.
        line: The prompt, or why it is invalid.
    """

    number: int
    id: str
    digest: str
    line: PromptLine | InvalidRequestError

    def request(self, folder: Path, text_only: bool) -> GenerateRequest:
        """Give the request, with its files.

        Args:
            folder: The base of relative paths.
            text_only: No speech, whatever the line says.

        Raises:
            InvalidRequestError: The line is not a prompt.
        """
        line = self.line
        if isinstance(line, InvalidRequestError):
            raise line
        prompt: str | list[ChatMessage] = line.text
        if line.messages is not None:
            prompt = [ChatMessage(turn.role, turn.content) for turn in line.messages]
        return build_request(
            prompt,
            audio=_located(line.audio, folder),
            images=_located(line.images, folder),
            videos=_located(line.videos, folder),
            system=line.system,
            speech=line.speech and not text_only,
            voice=line.voice or line.speaker,
            seed=line.seed,
            use_audio_in_video=line.use_audio_in_video,
            text_sampling=SamplingOverrides(temperature=line.temperature, max_tokens=line.max_tokens),
            codec_sampling=SamplingOverrides(temperature=line.temperature, max_tokens=line.max_codec_tokens),
            say=line.say,
        )


def read_jobs(path: Path) -> Iterator[BatchJob]:
    """Give the jobs of a file, in its order; empty lines and a byte order mark are skipped.

    Raises:
        OutputError: The file cannot be read.
    """
    decoder = msgspec.json.Decoder(PromptLine)
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            if not file.seekable():
                raise OutputError(f"{path} is read twice, which a pipe cannot be: write it to a file first")
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(raw) > MAX_LINE_BYTES:
                    rest = raw
                    while rest and not rest.endswith(b"\n"):
                        rest = file.readline(MAX_LINE_BYTES)
                    error = InvalidRequestError(f"line {number}: longer than {MAX_LINE_BYTES} bytes")
                    yield BatchJob(number, f"line-{number}", hashlib.sha256(raw).hexdigest(), error)
                    continue
                line = (raw.removeprefix(BOM_UTF8) if number == 1 else raw).strip()
                if line:
                    yield _job(decoder, line, number, seen)
    except OSError as problem:
        raise OutputError(f"cannot read {path}: {problem.strerror}") from problem


def _job(decoder: "msgspec.json.Decoder[PromptLine]", raw: bytes, number: int, seen: set[str]) -> BatchJob:
    digest = hashlib.sha256(raw).hexdigest()
    try:
        line = decoder.decode(raw)
        name = _checked_id(f"line-{number}" if line.id is None else line.id, seen)
        if line.messages is not None and (line.text or line.audio or line.images or line.videos):
            raise InvalidRequestError(
                "messages cannot be combined with text, audio, images and videos", "messages"
            )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        invalid = InvalidRequestError(f"line {number}: {said(error)}")
    except InvalidRequestError as error:
        invalid = InvalidRequestError(f"line {number}: {error}", error.param)
    else:
        seen.add(name)
        return BatchJob(number, name, digest, line)
    return BatchJob(number, _readable_id(raw, number), digest, invalid)


def _readable_id(raw: bytes, number: int) -> str:
    """Give the id of a line that is not a prompt, or the line's number if it has none that can be read."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if _ID.fullmatch(name := msgspec.json.decode(raw, type=_Named).id or ""):
            return name
    return f"line-{number}"


def _checked_id(name: str, seen: set[str]) -> str:
    if not _ID.fullmatch(name):
        raise InvalidRequestError(
            "id must be up to 128 of A-Z, a-z, 0-9, '.', '_' and '-', and not begin with '.' or '-'", "id"
        )
    if name in seen:
        raise InvalidRequestError(f"another line has the id {name!r} too", "id")
    return name


def _located(sources: list[str], folder: Path) -> list[str]:
    return [each if each[:6].lower().startswith(_URLS) else str(folder / each) for each in sources]
