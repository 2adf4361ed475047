"""Held-out questions of every kind, the same for each evaluation of a checkpoint."""

import random
import zlib
from dataclasses import dataclass

import numpy as np

from labs.training.data import images, world
from labs.training.data.augmentation import RATE
from labs.training.data.conditions import CONDITIONS, WORDLESS, Recorded
from labs.training.data.dialogues import (
    Conversations,
    Dialogue,
    Turn,
    is_known,
    read_aloud,
    talk_exchanges,
    unknown_question,
)
from labs.training.data.hearing import UNHEARD, trained_voice
from labs.training.data.synthesis import Speak, SynthesizerVoice, Wave

_SEED = 11
_OF_UNHEARD = 40
_OF_CONDITION = 4
_MANY_TURNS = 30


@dataclass(frozen=True)
class Question:
    """A dialogue whose last reply is wanted.

    Attributes:
        dialogue: the turns.
        voice: asks the last one where it is spoken.
        recorded: what becomes of what the voice says.
    """

    dialogue: Dialogue
    voice: SynthesizerVoice | None = None
    recorded: Recorded | None = None

    @property
    def reply(self) -> str:
        """The right answer."""
        return self.dialogue.turns[-1].reply

    def wave(self, speak: Speak) -> Wave | None:
        """Return the recording of the last turn, 16 kHz, if it is spoken."""
        turn = self.dialogue.turns[-1]
        if not turn.spoken:
            return None
        said = np.zeros(0, np.float32) if self.voice is None else speak(self.voice, turn.question, RATE)
        draw = np.random.default_rng(zlib.crc32(f"{turn.question}/{len(said)}".encode()))
        return said if self.recorded is None else self.recorded(said, draw)


def typed_questions(count: int) -> dict[str, list[Question]]:
    """Return questions in writing, at most ``count`` of a kind."""
    generator = random.Random(_SEED)
    facts = [fact for fact in world.FACTS if fact.is_held_out]
    easy = [fact for fact in facts if world.is_easy(fact)]
    small_sums = [fact for fact in facts if 2 <= fact.left <= 20]
    talk = [Turn(*exchange) for exchange in talk_exchanges(held_out=True)]
    return {
        "text, unseen calculations up to twenty": [
            _alone(_asking(fact)) for fact in generator.sample(easy, min(count, len(easy)))
        ],
        "text, unseen calculations": [_alone(_asking(fact)) for fact in generator.sample(facts, count)],
        "text, unseen calculations that go on": [
            _going_on(fact, generator) for fact in generator.sample(small_sums, count)
        ],
        "text, unseen small talk": [_alone(turn) for turn in talk[:count]],
    }


def seen_questions(count: int) -> dict[str, list[Question]]:
    """Return questions over images that were never drawn before."""
    generator = random.Random(_SEED + 1)
    conversations = Conversations()
    scenes = [images.scene(generator) for _ in range(count)]
    return {
        "images, what do you see": [
            _alone(Turn("what do you see", scene.exchanges[0][1], scene=scene)) for scene in scenes
        ],
        "images, any question": [Question(conversations.seen(generator)) for _ in range(count)],
    }


def spoken_questions(count: int) -> dict[str, list[Question]]:
    """Return spoken questions: in voices of the training, and in each that it never heard."""
    generator = random.Random(_SEED + 2)
    facts = [fact for fact in world.FACTS if fact.is_held_out]
    turns = [_asking(fact, spoken=True) for fact in generator.sample(facts, count // 2)]
    turns += [Turn(*Conversations().exchange(generator), spoken=True) for _ in range(count - count // 2)]
    fewer = turns[:: max(1, len(turns) // _OF_UNHEARD)]
    return {
        "speech, trained voices": [_alone(turn, trained_voice(generator)) for turn in turns],
        **{
            f"speech, {voice.name}, never trained on": [_alone(turn, voice) for turn in fewer]
            for voice in UNHEARD
        },
    }


def recorded_questions(count: int) -> dict[str, list[Question]]:
    """Return spoken questions in voices of the training, recorded elsewhere; and recordings without words."""
    generator = random.Random(_SEED + 3)
    facts = [fact for fact in world.FACTS if fact.is_held_out]
    few = max(1, count // _OF_CONDITION)
    found = {}
    for group, conditions in CONDITIONS.items():
        for name, recorded in conditions.items():
            turns = [_asking(fact, spoken=True) for fact in generator.sample(facts, few - few // 2)]
            turns += [Turn(*Conversations().exchange(generator), spoken=True) for _ in range(few // 2)]
            found[f"{group}, {name}"] = [
                Question(Dialogue((turn,)), trained_voice(generator), recorded) for turn in turns
            ]
    for name, recorded in WORDLESS.items():
        reply = world.UNHEARD if name == "silence" else world.UNKNOWN
        found[f"nobody speaks, {name}"] = [
            Question(Dialogue((Turn(str(number), reply, spoken=True),)), None, recorded)
            for number in range(few)
        ]
    return found


def other_questions(count: int) -> dict[str, list[Question]]:
    """Return questions in capitals, of unknown things, after many turns; and texts that are to be read."""
    generator = random.Random(_SEED + 4)
    conversations = Conversations()
    facts = [fact for fact in world.FACTS if fact.is_held_out]
    few = max(1, count // 2)

    def loud(fact: world.Fact) -> Turn:
        return Turn(f"WHAT IS {fact.question.upper()}?", fact.reply)

    def after_many(fact: world.Fact) -> Dialogue:
        earlier = [Turn(*conversations.exchange(generator)) for _ in range(_MANY_TURNS)]
        return Dialogue((*earlier, _asking(fact)))

    unknown = [unknown_question(generator) for _ in range(2 * few)]
    wrong = [f"{fact.question} is {world.number((fact.result + 3) % 50)}" for fact in facts]
    texts = {
        "sums": [fact.reply for fact in facts],
        "wrong sums": wrong,
        "questions": [f"what is {fact.question}" for fact in facts],
        "any words": world.word_sequences(count, _SEED),
    }
    return {
        "typed, in capitals": [_alone(loud(fact)) for fact in generator.sample(facts, few)],
        f"typed, after {_MANY_TURNS} turns": [
            Question(after_many(fact)) for fact in generator.sample(facts, few)
        ],
        "unknown, typed": [_alone(Turn(text, world.UNKNOWN)) for text in unknown if not is_known(text)][:few],
        **{
            f"reading, {name}": [
                Question(read_aloud(text)) for text in generator.sample(found, max(1, few // 2))
            ]
            for name, found in texts.items()
        },
    }


def _asking(fact: world.Fact, *, spoken: bool = False) -> Turn:
    return Turn(f"what is {fact.question}", fact.reply, spoken=spoken)


def _alone(turn: Turn, voice: SynthesizerVoice | None = None) -> Question:
    return Question(Dialogue((turn,)), voice)


def _going_on(fact: world.Fact, generator: random.Random) -> Question:
    right = generator.randint(1, fact.left - 1)
    first = world.Fact(fact.left - right, "plus", right)
    following = Turn(f"and {fact.operation} {world.number(fact.right)}", fact.reply)
    return Question(Dialogue((_asking(first), following)))


def all_questions(count: int) -> dict[str, list[Question]]:
    """Return the questions of every kind, at most ``count`` of each."""
    kinds = (typed_questions, seen_questions, spoken_questions, recorded_questions, other_questions)
    return {kind: found for questions in kinds for kind, found in questions(count).items()}
