"""Errors that end a request, to events and back: the client raises the class that the gateway raised."""

from collections.abc import Iterator
from typing import Final

from omnirelay.errors import BusyError, OmniRelayError, RequestError
from omnirelay.events import ErrorEvent


def _family(base: type[RequestError]) -> Iterator[type[RequestError]]:
    yield base
    for child in base.__subclasses__():
        yield from _family(child)


BY_CODE: Final = {kind.code: kind for kind in _family(RequestError)}
"""The class of each error that may end a request."""


def to_event(error: OmniRelayError) -> ErrorEvent:
    """Convert an error to the event that reports it."""
    retry_after_ms = error.retry_after_ms if isinstance(error, BusyError) else None
    return ErrorEvent(code=error.code, message=str(error), retry_after_ms=retry_after_ms)


def from_event(event: ErrorEvent) -> RequestError:
    """Convert an event to its error; an unknown code becomes a plain :class:`RequestError`."""
    kind = BY_CODE.get(event.code)
    if kind is None:
        return RequestError(f"{event.code}: {event.message}")
    if issubclass(kind, BusyError):
        return kind(event.message, event.retry_after_ms or 0)
    return kind(event.message)
