"""Seeds of draws: each a function of the request's seed and of how many draws there were before.

So who resumes a request draws what the first run would have drawn, whatever machine they are on and whatever
else is in their batch.

A request has one seed for its stages, and each stage has a stream of its own: the stage's name is mixed into
the seed.  Text and codec tokens of an answer would else be drawn with the same random numbers, one by one.
"""

from typing import Final

from vllm import SamplingParams

from shared.messages import StageName
from shared.vllm.sampling.arguments import arguments_of

GOLDEN: Final = 0x9E3779B97F4A7C15
MIXING: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and factors of splitmix64."""
_WORD: Final = 2**64 - 1


def go_on_drawing(params: SamplingParams, stage: StageName, seed: int, made: int) -> SamplingParams:
    """Let a request draw as if it had drawn before.

    Args:
        params: Changed in place.
        stage: Who draws.
        seed: The request's.
        made: How many draws there were.
    """
    # The seed is mixed before anything is added: else the draws of neighbouring seeds would be each other's,
    # shifted.  The same holds for the name.
    stream = mix(mix(seed) ^ int.from_bytes(stage.encode()))
    arguments = arguments_of(params)
    arguments.stream, arguments.made = stream, made
    return params


def seed_of_draw(params: SamplingParams, drawn: int) -> int:
    """The seed of a request's next draw, 64 bits.

    Args:
        params: What :func:`go_on_drawing` returned.
        drawn: Tokens drawn since then.
    """
    arguments = arguments_of(params)
    return mix(arguments.stream + (arguments.made + drawn) * GOLDEN)


def uniform(seed: int, count: int) -> list[float]:
    """Numbers of [0, 1), exact in float32: what else is drawn with a draw of this seed."""
    return [(mix(seed + number * GOLDEN) >> 40) / 2**24 for number in range(count)]


def mix(state: int) -> int:
    """Spread a number over 64 bits: splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014).
    """
    mixed = (state + GOLDEN) & _WORD
    for shift, factor in MIXING:
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _WORD
    return mixed ^ (mixed >> 31)
