"""Dialogues of the closed world: questions as people type and speak them, and their replies."""

import random
from dataclasses import dataclass, field, replace

from checkpoint.tokenizer import COMMON_WORDS
from labs.training.data import images, world
from labs.training.data.images import Exchange, Scene
from labs.training.data.world import Fact, FactSampler, number
from shared.config.gateway import READ_PROMPT

_SIGNS = {"plus": ("+",), "minus": ("-",), "times": ("*", "x")}
_DIGITS, _CAPITAL, _MARK, _CONTRACTED = 0.25, 0.4, 0.5, 0.05
_MARKS = (".", "!", "...", "?!", ",", " ?", ";")
_MARKS_WITHIN, _MARKED = (",", ".", "!", "?"), 0.04
_MOST_TURNS = 32
_LARGEST_ADDED = 20
TRANSCRIBE = "Transcribe the audio."
_TRANSCRIBED = 0.15


@dataclass(frozen=True)
class Turn:
    """One question and its reply; a spoken one is heard instead of read.

    ``instruction`` is text that follows what is spoken.
    """

    question: str
    reply: str
    spoken: bool = False
    scene: Scene | None = None
    instruction: str = ""


@dataclass(frozen=True)
class Dialogue:
    """Turns in order; the last one's reply is to be learnt."""

    turns: tuple[Turn, ...]

    def replying(self, text: str) -> "Dialogue":
        """Return the same dialogue with another last reply."""
        return Dialogue((*self.turns[:-1], replace(self.turns[-1], reply=text)))

    def after(self, *earlier: Turn) -> "Dialogue":
        """Return the same dialogue behind earlier turns."""
        return Dialogue((*earlier, *self.turns))


@dataclass(frozen=True)
class Spoken:
    """A question that exists as sound.

    ``reply`` is empty where it depends on what came before: an operation to go on with, or an image.
    """

    question: str
    reply: str = ""


def talk_exchanges(*, held_out: bool = False) -> list[Exchange]:
    """Return questions of small talk; the pairs of greeting and question held out are never trained."""
    alone = [*world.SMALL_TALK.items(), *world.PARTING.items()]
    pairs = [
        (f"{greeting} {question}", f"{answer} {reply}")
        for greeting, answer in world.GREETINGS.items()
        for question, reply in world.SMALL_TALK.items()
    ]
    kept = [pair for pair in pairs if not _is_held_out_talk(pair[0])]
    return [pair for pair in pairs if pair not in kept] if held_out else [*alone, *kept]


def _is_held_out_talk(question: str) -> bool:
    # Never one with "hi", which alone would leave nothing to conclude its greeting from.
    return not question.startswith("hi ") and world.is_held_out_sentence(f"talk {question}", 5)


def unknown_question(generator: random.Random) -> str:
    """Return a question that the world has no answer to."""
    words = [generator.choice(COMMON_WORDS) for _ in range(4)]
    ours = generator.sample(
        [*world.COLOURS, *world.SHAPES, *world.OPERATIONS, "name", "you", "see", "two"], 3
    )
    templates = (
        f"what is the {words[0]}",
        f"what is {words[0]} {words[1]}",
        f"what is a {words[0]}",
        f"tell me about the {words[0]}",
        f"how do i {words[0]} a {words[1]}",
        f"where is the {words[0]} {words[1]}",
        f"who is {words[0]}",
        f"can you {words[0]} the {words[1]}",
        f"how many {words[0]} are there",
        f"what is {ours[0]} plus {ours[1]}",
        f"why do you {words[0]}",
        f"when is the {words[0]}",
        f"do you {words[0]} {words[1]}",
        f"are you {words[0]}",
        " ".join(words),
        " ".join([words[0], *ours]),
    )
    return generator.choice(templates)


def is_known(question: str) -> bool:
    """Whether a question is one of small talk."""
    return question in _KNOWN


def unspoken(reply: str) -> Dialogue:
    """Return a dialogue over a recording in which nobody says anything."""
    return Dialogue((Turn("", reply, spoken=True),))


def read_aloud(text: str) -> Dialogue:
    """Return a dialogue whose reply is a text that is given, as the gateway asks for it."""
    return Dialogue((Turn(READ_PROMPT, text),))


def written_down(spoken: str) -> Dialogue:
    """Return a dialogue that asks for the words that are spoken."""
    return Dialogue((Turn(spoken, spoken, spoken=True, instruction=TRANSCRIBE),))


_VOCABULARY = world.vocabulary()
_WORDS = set(_VOCABULARY)
_REPLIES = world.fixed_replies()
_KNOWN = {question for question, _ in (*talk_exchanges(), *talk_exchanges(held_out=True))}


def count_exchange(generator: random.Random) -> Exchange:
    """Return a request to count."""
    last = generator.randint(2, 10)
    return f"count to {number(last)}", world.counting(last)


def digits_exchange(generator: random.Random) -> Exchange:
    """Return digits that are to be repeated."""
    said = world.digits(generator)
    return generator.choice((said, said, f"say {said}")), f"you said {said}"


_SCENE_QUESTIONS = (
    "what do you see",
    "what colour is it",
    "what shape is it",
    "where is it",
    "how many do you see",
)


_TRAINED = tuple(fact for fact in world.FACTS if not fact.is_held_out)
_BOTH_ORDERS = {
    operation: [
        (fact, other)
        for fact in _TRAINED
        if fact.operation == operation
        and fact.left < fact.right
        and not (other := Fact(fact.right, operation, fact.left)).is_held_out
    ]
    for operation in world.OPERATIONS
}


class Conversations:
    """Draws training dialogues, without held-out questions.

    Args:
        alike: the share of calculations in which small numbers are not preferred.
    """

    def __init__(self, alike: float = 0.0) -> None:
        self._alike = alike
        self._facts = FactSampler()
        self._talk = talk_exchanges()
        self._trained = set(_TRAINED)

    def exchange(self, generator: random.Random) -> Exchange:
        """Draw a question that stands alone, and its reply."""
        kind = generator.choices(range(6), weights=(52, 20, 4, 4, 16, 4))[0]
        if kind == 0:
            fact = self._fact(generator)
            return generator.choice(("what is ", "what is ", "")) + fact.question, fact.reply
        if kind == 1:
            return generator.choice(self._talk)
        if kind == 2:
            return count_exchange(generator)
        if kind == 3:
            return digits_exchange(generator)
        if kind == 4:
            question = unknown_question(generator)
            return (question, world.UNKNOWN) if not is_known(question) else self.exchange(generator)
        return generator.choice(_SCENE_QUESTIONS), world.UNKNOWN

    def typed(self, generator: random.Random) -> Dialogue:
        """Draw a dialogue in writing: a question, or two that belong together or do not."""
        shape = generator.choices(range(3), weights=(55, 30, 15))[0]
        if shape == 1:
            return self._followed(generator)
        turns = [Turn(*self.exchange(generator)) for _ in range(1 + (shape == 2))]
        return Dialogue(tuple(self._as_typed(turn, generator) for turn in turns))

    def long(self, generator: random.Random) -> Dialogue:
        """Draw many questions in writing, one after the other; the last may go on from the one before."""
        earlier = [
            self._as_typed(Turn(*self.exchange(generator)), generator)
            for _ in range(generator.randint(2, _MOST_TURNS))
        ]
        return self.typed(generator).after(*earlier)

    def orders(self, generator: random.Random, count: int) -> list[Dialogue]:
        """Draw ``count`` calculations, and then the same in the other order, all of them trained."""
        operations = generator.choices(world.OPERATIONS, (40, 25, 35), k=count)
        drawn = [generator.choice(_BOTH_ORDERS[operation]) for operation in operations]
        start = generator.choice(("what is ", "what is ", ""))
        turns = [
            Turn(start + fact.question, fact.reply) for order in zip(*drawn, strict=True) for fact in order
        ]
        return [Dialogue((self._as_typed(turn, generator),)) for turn in turns]

    def text(self, generator: random.Random) -> str:
        """Draw a text of the world's words that is to be read aloud: of any kind, right or wrong."""
        kind = generator.choices(range(4), weights=(35, 30, 15, 20))[0]
        if kind == 0:
            text = world.sentence(generator, self._facts)
        elif kind == 1:
            text = self.exchange(generator)[0]
        elif kind == 2:
            text = generator.choice(_REPLIES)
        else:
            text = " ".join(generator.choices(_VOCABULARY, k=generator.randint(1, 12)))
        if not set(text.split()) <= _WORDS:
            return self.text(generator)
        if generator.random() < 0.3:
            # As a sum that is wrong, or with a word that does not belong there.
            words = text.split()
            words[generator.randrange(len(words))] = generator.choice(_VOCABULARY)
            text = " ".join(words)
        return text

    def heard(self, spoken: Spoken, generator: random.Random) -> Dialogue:
        """Return a dialogue whose last question is ``spoken``: answered, or sometimes written down."""
        if set(spoken.question.split()) <= _WORDS and generator.random() < _TRANSCRIBED:
            return written_down(spoken.question)
        if spoken.reply:
            before = self._unrelated(generator) if generator.random() < 0.2 else ()
            return Dialogue((*before, Turn(spoken.question, spoken.reply, spoken=True)))
        if spoken.question in FOLLOWING:
            first, second = self._two_facts(generator, FOLLOWING[spoken.question])
            asked = self._as_typed(Turn(f"what is {first.question}", first.reply), generator)
            return Dialogue((asked, Turn(spoken.question, second.reply, spoken=True)))
        return self._over_image(generator, spoken.question)

    def seen(self, generator: random.Random) -> Dialogue:
        """Draw a dialogue over an image."""
        return self._over_image(generator, None)

    def mixed(self, generator: random.Random) -> Dialogue:
        """Draw a dialogue over an image, and something else that is asked before it or after it."""
        seen = self.seen(generator)
        other = self._as_typed(Turn(*self.exchange(generator)), generator)
        return Dialogue((*seen.turns, other)) if generator.random() < 0.5 else seen.after(other)

    def _unrelated(self, generator: random.Random) -> tuple[Turn, ...]:
        if generator.random() < 0.5:
            return self.seen(generator).turns
        return (self._as_typed(Turn(*self.exchange(generator)), generator),)

    def _over_image(self, generator: random.Random, spoken: str | None) -> Dialogue:
        while True:
            scene = images.scene(generator)
            replies = dict(scene.exchanges)
            if spoken is None or spoken in replies:
                break
        # One question in two is the plain one, which needs all of the image.
        question = spoken or (
            "what do you see" if generator.random() < 0.5 else generator.choice(scene.exchanges)[0]
        )
        last = Turn(question, replies[question], spoken=spoken is not None, scene=scene)
        if generator.random() < 0.2:
            earlier = generator.choice(scene.exchanges)
            first = self._as_typed(Turn(*earlier, scene=scene), generator)
            last = Turn(last.question, last.reply, last.spoken)
            return Dialogue((first, last if last.spoken else self._as_typed(last, generator)))
        return Dialogue((last if last.spoken else self._as_typed(last, generator),))

    def _followed(self, generator: random.Random) -> Dialogue:
        first, second = self._two_facts(generator)
        question = generator.choice(("and ", "and ", "")) + f"{second.operation} {number(second.right)}"
        turns = (Turn(f"what is {first.question}", first.reply), Turn(question, second.reply))
        return Dialogue(tuple(self._as_typed(turn, generator) for turn in turns))

    def _two_facts(
        self, generator: random.Random, following: tuple[str, int] | None = None
    ) -> tuple[Fact, Fact]:
        """Return a calculation and one that goes on from its result, by ``following`` if it is given."""
        while True:
            first = self._fact(generator)
            operation, right = following or (
                generator.choice(world.OPERATIONS),
                generator.randint(0, generator.choice((5, 10, _LARGEST_ADDED, 100))),
            )
            second = Fact(first.result, operation, right)
            if second in self._trained:
                return first, second

    def _fact(self, generator: random.Random) -> Fact:
        alike = self._alike and generator.random() < self._alike
        return generator.choice(_TRAINED) if alike else self._facts.draw(generator)

    def _as_typed(self, turn: Turn, generator: random.Random) -> Turn:
        return Turn(as_typed(turn.question, generator), turn.reply, turn.spoken, turn.scene)


FOLLOWING = {
    f"and {operation} {number(right)}": (operation, right)
    for operation in world.OPERATIONS
    for right in range(11)
}
"""The spoken questions that go on from a result."""


def as_typed(question: str, generator: random.Random) -> str:
    """Return a question as somebody might type it: with figures, signs, a capital, a mark."""
    text = question
    if generator.random() < _DIGITS:
        text = _with_figures(text)
        if generator.random() < 0.5:
            text = " ".join(
                generator.choice(_SIGNS[word]) if word in _SIGNS else word for word in text.split()
            )
    if generator.random() < _CONTRACTED:
        text = text.replace("what is", "what's")
    if generator.random() < _CAPITAL:
        text = text[:1].upper() + text[1:]
    if generator.random() < _MARK:
        asks = question.split(maxsplit=1)[0] in _ASKING and generator.random() < 0.8
        text += "?" if asks else generator.choice(_MARKS)
    return text


_ASKING = {"what", "who", "where", "how", "can", "are", "is", "do", "and", "why", "when"}
_NUMBERS = {number(value): value for value in range(101)}


def _with_figures(text: str) -> str:
    words, figures = text.split(), []
    while words:
        pair = " ".join(words[:2])
        length = 2 if len(words) > 1 and pair in _NUMBERS else 1
        phrase = " ".join(words[:length])
        figures.append(str(_NUMBERS[phrase]) if phrase in _NUMBERS else phrase)
        del words[:length]
    return " ".join(figures)


def texts_to_read(count: int) -> list[str]:
    """Return ``count`` texts that are read aloud in the training of speech."""
    generator, conversations = random.Random(2), Conversations()
    found: dict[str, None] = {}
    while len(found) < count:
        text = conversations.text(generator)
        if not world.is_held_out_sentence(text):
            found[text] = None
    return list(found)


def as_written(text: str, generator: random.Random) -> str:
    """Return a text as somebody might write it down: with a capital, and with marks that are not spoken."""
    words = [
        word + (generator.choice(_MARKS_WITHIN) if generator.random() < _MARKED else "")
        for word in text.split()
    ]
    written = " ".join(words)
    if generator.random() < _CAPITAL:
        written = written[:1].upper() + written[1:]
    return written + (generator.choice(".?!") if generator.random() < _MARK else "")


@dataclass
class SpokenQuestions:
    """Draws questions to be synthesized for hearing."""

    conversations: Conversations = field(default_factory=Conversations)

    def draw(self, generator: random.Random) -> Spoken:
        """Return one question."""
        # The sampler prefers numbers up to twenty, which leaves too few recordings of the others.
        kind = generator.choices(range(6), weights=(25, 10, 12, 10, 8, 35))[0]
        if kind == 0:
            return Spoken(*self.conversations.exchange(generator))
        if kind == 1:
            return Spoken(*generator.choice(talk_exchanges()))
        if kind == 2:
            return Spoken(*digits_exchange(generator))
        if kind == 3:
            return Spoken(generator.choice(list(FOLLOWING)))
        if kind == 4:
            return Spoken(generator.choice(images.scene(generator).exchanges)[0])
        fact = generator.choice(_TRAINED)
        return Spoken(generator.choice(("what is ", "what is ", "")) + fact.question, fact.reply)
