"""Errors that end a request, to events and back: they keep their class on the client's side."""

from collections.abc import Iterator
from typing import Final

from gateway.events import ErrorEvent
from shared.errors import BusyError, MediaError, OmniRelayError, RequestError, StageFailedError
from shared.messages import RequestFailed


def _family(base: type[RequestError]) -> Iterator[type[RequestError]]:
    yield base
    for child in base.__subclasses__():
        yield from _family(child)


RETRY_BUSY_STAGE_MS: Final = 1000
"""When to come back after a stage had no room; it cannot say itself."""
_BY_CODE: Final = {kind.code: kind for kind in _family(RequestError)}


def to_event(error: OmniRelayError) -> ErrorEvent:
    """Tell an error to a client."""
    retry_after_ms = error.retry_after_ms if isinstance(error, BusyError) else None
    return ErrorEvent(code=error.code, message=str(error), retry_after_ms=retry_after_ms)


def from_event(event: ErrorEvent) -> RequestError:
    """Give the error that a gateway told; a code unknown here becomes a plain :class:`RequestError`."""
    kind = _BY_CODE.get(event.code)
    if kind is None:
        return RequestError(f"{event.code}: {event.message}")
    if issubclass(kind, BusyError):
        return kind(event.message, event.retry_after_ms or 0)
    return kind(event.message)


def from_stage(failed: RequestFailed) -> RequestError:
    """Give the error that a stage told; codes that mean nothing to a client become ``stage_failed``."""
    kind = _BY_CODE.get(failed.code)
    if kind is not None and issubclass(kind, MediaError):
        # Begins with the name of the item, wherever it is found.
        return kind(failed.message)
    message = f"{failed.stage}: {failed.message}"
    if kind is not None and issubclass(kind, BusyError):
        return kind(message, RETRY_BUSY_STAGE_MS)
    if kind is None or kind is RequestError:
        return StageFailedError(f"{message} ({failed.code})")
    return kind(message)
