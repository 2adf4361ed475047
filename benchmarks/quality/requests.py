"""Held-out questions as requests: their images drawn, their speech synthesized."""

import io
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import soundfile

from checkpoint.training.data.augmentation import RATE
from checkpoint.training.data.dialogues import Turn
from checkpoint.training.data.questions import Question, seen_questions, spoken_questions, typed_questions
from checkpoint.training.data.synthesis import Speak, SynthesizerVoice, synthesize
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
    def seed(self) -> int:
        """A seed of its own, the same in each run."""
        return zlib.crc32(f"{self.kind}/{self.speaker}/{self.reply}".encode())


def held_out_requests(count: int, speakers: Sequence[str], speak: Speak = synthesize) -> list[Asked]:
    """Return the requests of every kind, at most ``count`` of each; the speakers take turns."""
    kinds = {**typed_questions(count), **seen_questions(count), **spoken_questions(count)}
    return [
        Asked(kind, _messages(question, speak), question.reply, speakers[number % len(speakers)])
        for kind, questions in kinds.items()
        for number, question in enumerate(questions)
    ]


def _messages(question: Question, speak: Speak) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    generator = random.Random(zlib.crc32(question.reply.encode()))  # noqa: S311  (drawings)
    for turn in question.dialogue.turns:
        messages.append(ChatMessage("user", _content(turn, question.voice, generator, speak)))
        messages.append(ChatMessage("assistant", turn.reply))
    return messages[:-1]


def _content(
    turn: Turn, voice: SynthesizerVoice | None, generator: random.Random, speak: Speak
) -> list[ContentPart]:
    parts: list[ContentPart] = []
    if turn.scene is not None:
        parts.append(image(turn.scene.draw(generator)))
    if turn.spoken and voice is not None:
        parts.append(audio(_wav(speak(voice, turn.question, RATE))))
    else:
        parts.append(TextPart(turn.question))
    return parts


def _wav(samples: object) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()
