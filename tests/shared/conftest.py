"""Fixtures of the tests of ``shared``."""

from collections.abc import Iterator

import pytest

from tests.shared.support import Context


@pytest.fixture
def context() -> Iterator[Context]:
    """A ZeroMQ context; sockets that a test leaves open are closed with it."""
    context = Context()
    yield context
    context.destroy(linger=0)
