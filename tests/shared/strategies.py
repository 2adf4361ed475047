"""Hypothesis strategies: every message there is, with every value it may have, as msgspec knows its types."""

import math
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from shared import messages
from shared.messages.payloads import (
    ITEM_SIZE,
    ROW_DTYPES,
    AdditionalInformationEntry,
    Blob,
    PromptEmbedsPayload,
)

MOST_ITEMS = 5
"""Of a list or a mapping, and of a blob's bytes: none is read differently for being longer."""
MOST = 2**63 - 1


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[str], sides: st.SearchStrategy[list[int]]) -> dict[str, Any]:
    """A shape, a dtype, and the bytes that belong to them."""
    shape, dtype = tuple(draw(sides)), draw(st.sampled_from(dtypes))
    if math.prod(shape) > 64:
        shape = ()
    size = math.prod(shape) * ITEM_SIZE[dtype]
    return {"shape": shape, "dtype": dtype, "data": Blob(draw(st.binary(min_size=size, max_size=size)))}


rows = tensors(list(ROW_DTYPES), st.lists(st.integers(0, 6), min_size=2, max_size=2))
any_tensors = tensors(sorted(ITEM_SIZE), st.lists(st.integers(0, 3), max_size=8))
# NaN is not equal to itself, so it would only confuse comparisons.
plain_values: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1)
)
plain_values = plain_values | st.floats(allow_nan=False)

CONSISTENT: dict[type, st.SearchStrategy[Any]] = {
    PromptEmbedsPayload: rows.map(lambda found: PromptEmbedsPayload(**found)),
    AdditionalInformationEntry: st.builds(
        AdditionalInformationEntry, list_data=st.lists(plain_values, max_size=6)
    )
    | any_tensors.map(
        lambda found: AdditionalInformationEntry(**{f"tensor_{name}": each for name, each in found.items()})
    ),
}
"""Of structs whose fields have to agree with each other."""


def audio_chunk(samples: int, **fields: Any) -> messages.AudioChunk:
    """A chunk of silence."""
    return messages.AudioChunk(samples=samples, **(fields | {"data": Blob(bytes(4 * samples))}))


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """What a field of a type may hold."""
    return MAKERS[type(kind)](kind)


def integers(kind: inspect.IntType) -> st.SearchStrategy[int]:
    highest = kind.le if kind.le is not None else MOST if kind.lt is None else kind.lt - 1
    return st.integers(-MOST if kind.ge is None else kind.ge, highest)


def floats(kind: inspect.FloatType) -> st.SearchStrategy[float]:
    lowest = kind.gt if kind.ge is None else kind.ge
    return st.floats(lowest, kind.le, exclude_min=kind.gt is not None, allow_nan=False)


def texts(kind: inspect.StrType) -> st.SearchStrategy[str]:
    most = min(kind.max_length or 200, 200)
    if kind.pattern is None:
        return st.text(min_size=kind.min_length or 0, max_size=most)
    return st.from_regex(kind.pattern).filter(lambda text: len(text) <= most)


def sizes(kind: Any) -> dict[str, Any]:
    most = MOST_ITEMS if kind.max_length is None else min(kind.max_length, MOST_ITEMS)
    return {"min_size": kind.min_length or 0, "max_size": most}


def structs(kind: inspect.StructType) -> st.SearchStrategy[Any]:
    fields = {field.name: values_of(field.type) for field in kind.fields}
    if kind.cls is messages.AudioChunk:
        return st.builds(audio_chunk, **(fields | {"samples": st.integers(0, MOST_ITEMS)}))
    return CONSISTENT.get(kind.cls, st.builds(kind.cls, **fields))


MAKERS: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    inspect.NoneType: lambda _: st.none(),
    inspect.BoolType: lambda _: st.booleans(),
    inspect.IntType: integers,
    inspect.FloatType: floats,
    inspect.StrType: texts,
    inspect.LiteralType: lambda kind: st.sampled_from(kind.values),
    inspect.UnionType: lambda kind: st.one_of(*map(values_of, kind.types)),
    inspect.ListType: lambda kind: st.lists(values_of(kind.item_type), **sizes(kind)),
    inspect.VarTupleType: lambda kind: st.lists(values_of(kind.item_type), **sizes(kind)).map(tuple),
    inspect.TupleType: lambda kind: st.tuples(*map(values_of, kind.item_types)),
    inspect.DictType: lambda kind: st.dictionaries(
        values_of(kind.key_type), values_of(kind.value_type), **sizes(kind)
    ),
    inspect.CustomType: lambda _: st.binary(max_size=MOST_ITEMS).map(Blob),
    inspect.StructType: structs,
}


def messages_of(union: Any) -> st.SearchStrategy[Any]:
    """Any message that a decoder of a union takes."""
    return st.one_of([values_of(inspect.type_info(kind)) for kind in getattr(union, "__args__", (union,))])


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Some examples, the same ones each time."""
    found: list[Any] = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None)
    @given(strategy)
    def draw(example: Any) -> None:
        found.append(example)

    draw()
    return found


SOCKETS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    name: (union, messages_of(union))
    for name, union in {
        "thinker": messages.ThinkerInput | messages.Mark,
        "talker": messages.TalkerInput | messages.Mark,
        "token2wav": messages.Token2WavInput | messages.Mark,
        "events": messages.StageEvent | messages.Mark,
        "control at the gateway": messages.ControlToGateway,
        "control at a stage": messages.ControlToStage,
    }.items()
}
"""Of every kind of socket: the union its decoder takes, and a strategy for what it may carry."""
