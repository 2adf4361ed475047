"""Errors that stages report, as errors for clients."""

from typing import Final

from omnirelay.error_codes import BY_CODE
from omnirelay.errors import BusyError, MediaError, RequestError, StageFailedError
from shared.messages import RequestFailed

RETRY_BUSY_STAGE_MS: Final = 1000
"""A stage does not tell its own estimate."""


def from_stage(failed: RequestFailed) -> RequestError:
    """Convert a stage's error; codes internal to the stack become ``stage_failed``."""
    kind = BY_CODE.get(failed.code)
    if kind is not None and issubclass(kind, MediaError):
        # Starts with the name of the item at every place that raises it.
        return kind(failed.message)
    message = f"{failed.stage}: {failed.message}"
    if kind is not None and issubclass(kind, BusyError):
        return kind(message, RETRY_BUSY_STAGE_MS)
    if kind is None or kind is RequestError:
        return StageFailedError(f"{message} ({failed.code})")
    return kind(message)
