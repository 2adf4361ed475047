"""Held-out questions as requests: their images drawn, their speech synthesized."""

import io
import random
import zlib
from dataclasses import dataclass

import soundfile

from labs.training.data.augmentation import RATE
from labs.training.data.corpus import VOICES
from labs.training.data.dialogues import Turn
from labs.training.data.questions import Question, all_questions
from labs.training.data.synthesis import Speak, synthesize
from omnirelay import ChatMessage, TextPart, audio, image
from omnirelay.content import ContentPart


@dataclass(frozen=True, eq=False)
class Asked:
    """One request.

    Attributes:
        kind: Which row of the table it belongs to.
        messages: The conversation.
        reply: The right answer.
        speaker: Who is to say it.
    """

    kind: str
    messages: list[ChatMessage]
    reply: str
    speaker: str

    @property
    def is_read(self) -> bool:
        """The reply is given, to be spoken."""
        return self.kind.startswith("reading")

    @property
    def is_long(self) -> bool:
        """A long conversation goes before, longer than any that speech was trained on."""
        return self.kind.endswith("turns")

    @property
    def seed(self) -> int:
        """A seed of its own, the same in each run."""
        return zlib.crc32(f"{self.kind}/{self.speaker}/{self.reply}".encode())


def held_out_requests(count: int, speak: Speak = synthesize) -> list[Asked]:
    """Return the requests of every kind, at most ``count`` of each; the voices take turns."""
    speakers = list(VOICES)
    return [
        Asked(kind, _messages(question, speak), question.reply, speakers[number % len(speakers)])
        for kind, questions in all_questions(count).items()
        for number, question in enumerate(questions)
    ]


def _messages(question: Question, speak: Speak) -> list[ChatMessage]:
    messages = []
    generator = random.Random(zlib.crc32(question.reply.encode()))  # noqa: S311  (drawings)
    for turn in question.dialogue.turns:
        messages.append(ChatMessage("user", _content(turn, question, generator, speak)))
        messages.append(ChatMessage("assistant", turn.reply))
    return messages[:-1]


def _content(turn: Turn, question: Question, generator: random.Random, speak: Speak) -> list[ContentPart]:
    parts: list[ContentPart] = []
    if turn.scene is not None:
        parts.append(image(turn.scene.draw(generator)))
    spoken = question.wave(speak) if turn.spoken else None
    parts.append(TextPart(turn.question) if spoken is None else audio(_wav(spoken)))
    return parts


def _wav(samples: object) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()
