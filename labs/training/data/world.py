"""The closed world of the speaking checkpoint: vocabulary, sentences, and which of them are held out."""

import random
import zlib
from dataclasses import dataclass

_UNIT_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_UNITS = tuple(_UNIT_WORDS.split())
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")
SHAPES = ("circle", "square", "triangle", "star")
SIZES = ("big", "small")
PLACES = ("on the left", "on the right", "at the top", "at the bottom", "in the middle")
OPERATIONS = ("plus", "minus", "times")
UNKNOWN = "i do not know"
UNHEARD = "i do not hear you"
_QUESTION_WORDS = "what is how many do you see where colour shape say said count to and it the are there"

GREETINGS = {"hello": "hello", "hi": "hello", "good morning": "good morning", "good evening": "good evening"}
# What may follow a greeting, or stand alone.
SMALL_TALK = {
    "how are you": "i am good thank you",
    "what is your name": "my name is omni",
    "who are you": "i am a small model",
    "what are you": "i am a small model",
    "what can you do": "i can see and hear and count",
    "can you hear me": "yes i can hear you",
    "can you see": "yes i can see",
    "can you count": "yes i can count",
    "do you know me": "no i do not know you",
    "nice to meet you": "nice to meet you too",
    "my name is omni": "nice to meet you",
    "are you good": "yes i am good thank you",
}
# What stands alone only.
PARTING = {
    "thank you": "you are welcome",
    "thank you and goodbye": "you are welcome goodbye",
    "thank you and good night": "you are welcome good night",
    "goodbye": "goodbye",
    "good night": "good night",
    "hello": "hello",
    "hi": "hello",
    "good morning": "good morning",
    "good evening": "good evening",
}


@dataclass(frozen=True)
class Fact:
    """One calculation of the world: ``left OPERATION right``."""

    left: int
    operation: str
    right: int

    @property
    def result(self) -> int:
        """The number it comes to."""
        if self.operation == "plus":
            return self.left + self.right
        if self.operation == "minus":
            return self.left - self.right
        return self.left * self.right

    @property
    def question(self) -> str:
        """The calculation in words, without its result."""
        return f"{number(self.left)} {self.operation} {number(self.right)}"

    @property
    def reply(self) -> str:
        """The calculation and its result in words."""
        return f"{self.question} is {number(self.result)}"

    @property
    def is_held_out(self) -> bool:
        """Whether it is excluded from training.

        Of a sum or a product the other order is never held out too, so the rule can be known without it.
        """
        if self.operation != "minus":
            low, high = sorted((self.left, self.right))
            chosen = _digest(f"{low} {self.operation} {high}")
            return low != high and chosen % 8 == 0 and (chosen // 8 % 2 == 0) == (self.left == low)
        return _digest(f"{self.left} minus {self.right}") % 12 == 0


def _digest(text: str) -> int:
    """Return a number that depends on ``text`` alone, spread evenly."""
    return zlib.crc32(text.encode()) >> 4


def number(value: int) -> str:
    """Return a whole number from -100 to 100 in words."""
    if value < 0:
        return f"minus {number(-value)}"
    if value < len(_UNITS):
        return _UNITS[value]
    if value == 100:
        return "one hundred"
    tens, units = divmod(value, 10)
    return _TENS[tens - 2] + (f" {_UNITS[units]}" if units else "")


def with_article(words: str) -> str:
    """Return a noun phrase with "a" or "an" before it."""
    return f"an {words}" if words.startswith("orange") else f"a {words}"


def _facts() -> tuple[Fact, ...]:
    sums = [Fact(a, "plus", b) for a in range(101) for b in range(21) if a + b <= 100]
    mirrored = [Fact(b, "plus", a) for a in range(21, 101) for b in range(21) if a + b <= 100]
    differences = [Fact(a, "minus", b) for a in range(101) for b in range(21) if a - b >= -10]
    products = [Fact(a, "times", b) for a in range(11) for b in range(11)]
    return (*sums, *mirrored, *differences, *products)


FACTS = _facts()
"""Every calculation that the world knows."""


def is_easy(fact: Fact) -> bool:
    """Whether both numbers are at most twenty: what people ask first."""
    return fact.left <= 20 and fact.right <= 20


class FactSampler:
    """Draws calculations, easy ones more often: either trained or held-out ones."""

    def __init__(self, *, held_out: bool = False) -> None:
        facts = [fact for fact in FACTS if fact.is_held_out == held_out]
        self._groups = [
            [fact for fact in facts if fact.operation == operation and is_easy(fact) == easy]
            for operation, easy in (
                ("plus", True),
                ("minus", True),
                ("times", True),
                ("plus", False),
                ("minus", False),
            )
        ]
        self._following: dict[int, list[Fact]] = {}
        for fact in facts:
            self._following.setdefault(fact.left, []).append(fact)

    def draw(self, generator: random.Random) -> Fact:
        """Return one calculation."""
        group = generator.choices(self._groups, weights=(30, 25, 20, 15, 10))[0]
        return generator.choice(group)

    def following(self, left: int, generator: random.Random) -> Fact | None:
        """Return a calculation that goes on from ``left``, if the world has one."""
        facts = self._following.get(left)
        return generator.choice(facts) if facts else None


def counting(last: int) -> str:
    """Return the numbers from one to ``last``."""
    return " ".join(number(value) for value in range(1, last + 1))


def digits(generator: random.Random) -> str:
    """Return two to six spoken digits."""
    return " ".join(number(generator.randint(0, 9)) for _ in range(generator.randint(2, 6)))


def fixed_replies() -> list[str]:
    """Return every reply that is a sentence of its own, the same for each question that leads to it."""
    talk = [*SMALL_TALK.values(), *PARTING.values(), *GREETINGS.values(), UNKNOWN]
    talk += [f"{greeting} {reply}" for greeting in GREETINGS.values() for reply in SMALL_TALK.values()]
    talk += [counting(last) for last in range(2, 11)]
    talk += [f"it is {with_article(shape)}" for shape in SHAPES]
    talk += [f"{answer} it is {quality}" for answer in ("yes", "no") for quality in (*COLOURS, *SIZES)]
    talk += [f"it is {quality}" for quality in (*COLOURS, *SIZES)]
    return list(dict.fromkeys(talk))


def _noun(generator: random.Random) -> str:
    return f"{generator.choice(COLOURS)} {generator.choice(SHAPES)}"


def sentence(generator: random.Random, facts: FactSampler) -> str:
    """Draw one reply; kinds are weighted by how often dialogues use them."""
    kind = generator.choices(range(6), weights=(45, 12, 12, 12, 10, 9))[0]
    if kind == 0:
        return facts.draw(generator).reply
    if kind == 1:
        return f"it is a {generator.choice(SIZES)} {_noun(generator)}"
    if kind == 2:
        return f"i see {number(generator.randint(2, 9))} {_noun(generator)}s"
    if kind == 3:
        return f"i see {with_article(_noun(generator))} and {with_article(_noun(generator))}"
    if kind == 4:
        return f"the {_noun(generator)} is {generator.choice(PLACES)}"
    return f"you said {digits(generator)}"


def is_held_out_sentence(text: str, one_in: int = 14) -> bool:
    """Whether ``text`` is excluded from speech training."""
    return _digest(text) % one_in == 0


def spoken_sentences(count: int) -> tuple[list[str], list[str]]:
    """Return ``count`` training sentences for speech, and the held-out ones."""
    generator = random.Random(0)
    facts = FactSampler()
    seen = dict.fromkeys(fixed_replies())
    held_out: dict[str, None] = {}
    while len(seen) < count:
        text = sentence(generator, facts)
        (held_out if is_held_out_sentence(text) else seen)[text] = None
    return list(seen), list(held_out)


def word_sequences(count: int, seed: int = 1, shortest: int = 3) -> list[str]:
    """Return words in any order, so that speech follows each word and not the kind of sentence."""
    generator, words = random.Random(seed), vocabulary()
    return [" ".join(generator.choices(words, k=generator.randint(shortest, 8))) for _ in range(count)]


def vocabulary() -> list[str]:
    """Return every word of the world, in the order of the alphabet."""
    words = set(_UNITS) | set(_TENS) | {"hundred"} | set(OPERATIONS) | set(_QUESTION_WORDS.split())
    words |= {*COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES), *SIZES, "a", "an", "said"}
    texts = [*fixed_replies(), *PLACES, *GREETINGS, *SMALL_TALK, *PARTING]
    words |= {word for text in texts for word in text.split()}
    return sorted(words)
