"""Work that is done at the same time."""

import asyncio
from typing import Any

import pytest

from omnirelay.tasks import all_of, first_of


async def ends(name: str) -> str:
    return name


async def fails(name: str) -> str:
    raise ValueError(name)


async def stays(cancelled: list[str], name: str) -> str:
    try:
        return await asyncio.get_running_loop().create_future()
    finally:
        cancelled.append(name)


def test_all_results_come_in_order() -> None:
    assert asyncio.run(all_of(map(ends, "abc"))) == ["a", "b", "c"]


def test_what_ends_first_cancels_the_others() -> None:
    cancelled: list[str] = []
    assert asyncio.run(first_of(stays(cancelled, "a"), ends("b"), ends("c"))) == "b"
    with pytest.raises(ValueError, match="b"):
        asyncio.run(all_of([stays(cancelled, "c"), fails("b")]))
    with pytest.raises(ValueError, match="b"):
        asyncio.run(first_of(ends("a"), fails("b"), fails("c")))
    assert cancelled == ["a", "c"]


@pytest.mark.parametrize("how", [lambda *works: all_of(works), first_of])
def test_whoever_is_cancelled_leaves_nothing(how: Any) -> None:
    cancelled: list[str] = []
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(how(stays(cancelled, "a"), stays(cancelled, "b")), 0.01))
    assert cancelled == ["a", "b"]
