"""Held-out questions of every kind, the same for each evaluation of a checkpoint."""

import random
from dataclasses import dataclass

from checkpoint.training.data import images, world
from checkpoint.training.data.dialogues import Conversations, Dialogue, Turn, talk_exchanges
from checkpoint.training.data.hearing import UNHEARD, trained_voice
from checkpoint.training.data.synthesis import SynthesizerVoice

_SEED = 11
_OF_UNHEARD = 40


@dataclass(frozen=True)
class Question:
    """A dialogue whose last reply is wanted; ``voice`` asks it where it is spoken."""

    dialogue: Dialogue
    voice: SynthesizerVoice | None = None

    @property
    def reply(self) -> str:
        """The right answer."""
        return self.dialogue.turns[-1].reply


def typed_questions(count: int) -> dict[str, list[Question]]:
    """Return questions in writing, at most ``count`` of a kind."""
    generator = random.Random(_SEED)
    facts = [fact for fact in world.FACTS if fact.is_held_out]
    easy = [fact for fact in facts if world.is_easy(fact)]
    talk = [Turn(*exchange) for exchange in talk_exchanges(held_out=True)]
    return {
        "text, unseen calculations up to twenty": [
            _alone(_asking(fact)) for fact in generator.sample(easy, min(count, len(easy)))
        ],
        "text, unseen calculations": [_alone(_asking(fact)) for fact in generator.sample(facts, count)],
        "text, unseen calculations that go on": [
            _going_on(fact, generator) for fact in generator.sample(_reachable(facts), count)
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


def _asking(fact: world.Fact, *, spoken: bool = False) -> Turn:
    return Turn(f"what is {fact.question}", fact.reply, spoken=spoken)


def _alone(turn: Turn, voice: SynthesizerVoice | None = None) -> Question:
    return Question(Dialogue((turn,)), voice)


def _reachable(facts: list[world.Fact]) -> list[world.Fact]:
    """Return the facts whose left number is a small sum."""
    return [fact for fact in facts if 2 <= fact.left <= 20]


def _going_on(fact: world.Fact, generator: random.Random) -> Question:
    right = generator.randint(1, fact.left - 1)
    first = world.Fact(fact.left - right, "plus", right)
    following = Turn(f"and {fact.operation} {world.number(fact.right)}", fact.reply)
    return Question(Dialogue((_asking(first), following)))
