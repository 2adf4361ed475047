"""Drawn images of the world: shapes on a plain ground, and what can be asked of them."""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from labs.training.data.world import COLOURS, PLACES, SHAPES, SIZES, number, with_article

Exchange = tuple[str, str]
"""A question and its reply."""

_RGB = {
    "red": (215, 30, 30),
    "green": (30, 150, 45),
    "blue": (40, 65, 215),
    "yellow": (240, 222, 45),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
    "orange": (245, 138, 20),
    "purple": (125, 40, 155),
}
_COLOUR_SPREAD = 14
_LEAST_CONTRAST = 95.0
# Sides are drawn between these; radii and places are parts of the shorter side.
_SMALLEST_SIDE, _LARGEST_SIDE = 168, 336
_BIG, _SMALL, _MIDDLING = (0.21, 0.28), (0.07, 0.11), (0.10, 0.17)
_PLACES = {"on the left": (0.2, 0.5), "on the right": (0.8, 0.5), "at the top": (0.5, 0.2)}
_PLACES |= {"at the bottom": (0.5, 0.8), "in the middle": (0.5, 0.5)}
_GRID = 3
_MOST_COUNTED = 9


@dataclass(frozen=True)
class Thing:
    """One drawn shape; ``x``, ``y`` and ``radius`` are parts of the image's side."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float

    @property
    def noun(self) -> str:
        """What it is called."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What an image shows, and every question that may be asked over it, with the reply."""

    things: tuple[Thing, ...]
    exchanges: tuple[Exchange, ...]

    def draw(self, generator: random.Random) -> Image.Image:
        """Draw it on a ground on which every thing can be seen."""
        side = generator.randint(_SMALLEST_SIDE, _LARGEST_SIDE)
        fills = [_near(_RGB[thing.colour], generator) for thing in self.things]
        image = Image.new("RGB", (side, side), _ground(fills, generator))
        canvas = ImageDraw.Draw(image)
        shared = fills[0]
        alike = len({thing.colour for thing in self.things}) == 1
        for thing, fill in zip(self.things, fills, strict=True):
            _draw(canvas, thing, side, shared if alike else fill)
        return image


def one_thing(generator: random.Random) -> Scene:
    """Return a scene of one thing, big or small, at a place that has a name."""
    size, colour, shape = generator.choice(SIZES), generator.choice(COLOURS), generator.choice(SHAPES)
    place = generator.choice(PLACES)
    radius = generator.uniform(*(_BIG if size == "big" else _SMALL))
    x, y = _around(place, radius, generator)
    thing = Thing(colour, shape, x, y, radius)
    other_colour = generator.choice([one for one in COLOURS if one != colour])
    other_size = SIZES[1 - SIZES.index(size)]
    exchanges = [
        *((question, f"it is a {size} {thing.noun}") for question in ("what do you see", "what is it")),
        ("what colour is it", f"it is {colour}"),
        ("what shape is it", f"it is {with_article(shape)}"),
        ("where is it", f"the {thing.noun} is {place}"),
        (f"where is the {shape}", f"the {thing.noun} is {place}"),
        (f"is it {colour}", f"yes it is {colour}"),
        (f"is it {other_colour}", f"no it is {colour}"),
        (f"is it {size}", f"yes it is {size}"),
        (f"is it {other_size}", f"no it is {size}"),
    ]
    return Scene((thing,), tuple(exchanges))


def some_things(generator: random.Random) -> Scene:
    """Return a scene of two to nine things of one kind, which can be counted."""
    count = generator.randint(2, _MOST_COUNTED)
    colour, shape = generator.choice(COLOURS), generator.choice(SHAPES)
    cells = generator.sample(range(_GRID * _GRID), count)
    radius = generator.uniform(0.07, 0.12)
    slack = 0.5 / _GRID - radius
    things = tuple(
        Thing(
            colour,
            shape,
            (cell % _GRID + 0.5) / _GRID + generator.uniform(-slack, slack) * 0.8,
            (cell // _GRID + 0.5) / _GRID + generator.uniform(-slack, slack) * 0.8,
            radius,
        )
        for cell in cells
    )
    reply = f"i see {number(count)} {colour} {shape}s"
    questions = (
        "what do you see",
        "how many do you see",
        "how many are there",
        f"how many {shape}s do you see",
        f"how many {shape}s are there",
        f"how many {colour} {shape}s are there",
    )
    return Scene(things, tuple((question, reply) for question in questions))


def two_things(generator: random.Random) -> Scene:
    """Return a scene of two different things, side by side or one above the other."""
    first_colour, second_colour = generator.sample(COLOURS, 2)
    first_shape, second_shape = generator.choice(SHAPES), generator.choice(SHAPES)
    names = generator.choice((("on the left", "on the right"), ("at the top", "at the bottom")))
    radii = [generator.uniform(*_MIDDLING) for _ in names]
    spots = [_around(name, radius, generator) for name, radius in zip(names, radii, strict=True)]
    first = Thing(first_colour, first_shape, *spots[0], radii[0])
    second = Thing(second_colour, second_shape, *spots[1], radii[1])
    exchanges = [
        ("what do you see", f"i see {with_article(first.noun)} and {with_article(second.noun)}"),
        (f"where is the {first.noun}", f"the {first.noun} is {names[0]}"),
        (f"where is the {second.noun}", f"the {second.noun} is {names[1]}"),
        (f"what is {names[0]}", f"the {first.noun} is {names[0]}"),
        (f"what is {names[1]}", f"the {second.noun} is {names[1]}"),
    ]
    return Scene((first, second), tuple(exchanges))


def scene(generator: random.Random) -> Scene:
    """Return a scene of any kind."""
    return generator.choice((one_thing, some_things, two_things))(generator)


def _around(place: str, radius: float, generator: random.Random) -> tuple[float, float]:
    """Return a spot that nobody would call otherwise, where a thing of ``radius`` is wholly visible."""
    x, y = _PLACES[place]
    inside = radius + 0.02
    return tuple(  # type: ignore[return-value]
        min(max(value + generator.uniform(-0.07, 0.07), inside), 1 - inside) for value in (x, y)
    )


def _near(colour: tuple[int, int, int], generator: random.Random) -> tuple[int, int, int]:
    red, green, blue = (
        max(0, min(255, value + generator.randint(-_COLOUR_SPREAD, _COLOUR_SPREAD))) for value in colour
    )
    return red, green, blue


def _ground(fills: list[tuple[int, int, int]], generator: random.Random) -> tuple[int, int, int]:
    """Return a grey or pale colour that differs from every thing's."""
    while True:
        grey = generator.randint(40, 240)
        tint = generator.choice((0, 0, 12))
        red, green, blue = (max(0, min(255, grey + generator.randint(-tint, tint))) for _ in range(3))
        if all(math.dist((red, green, blue), fill) > _LEAST_CONTRAST for fill in fills):
            return red, green, blue


def _draw(canvas: ImageDraw.ImageDraw, thing: Thing, side: int, fill: tuple[int, int, int]) -> None:
    x, y, radius = thing.x * side, thing.y * side, thing.radius * side
    if thing.shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    elif thing.shape == "square":
        half = radius * 0.89
        canvas.rectangle((x - half, y - half, x + half, y + half), fill=fill)
    elif thing.shape == "triangle":
        canvas.polygon(((x, y - radius), (x - radius, y + radius), (x + radius, y + radius)), fill=fill)
    else:
        lengths = (radius * 1.1, radius * 0.46)
        points = [
            (x + lengths[k % 2] * math.sin(k * math.pi / 5), y - lengths[k % 2] * math.cos(k * math.pi / 5))
            for k in range(10)
        ]
        canvas.polygon(points, fill=fill)
