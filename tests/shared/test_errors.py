"""Error codes are words one can rely on, and what is done for one request alone ends that request alone."""

import inspect
import logging

import pytest

from omnirelay import errors
from omnirelay.errors import (
    MessageError,
    OmniRelayError,
    QueueFullError,
    RequestError,
    StageFailedError,
)
from shared.messages import RequestFailed, StageEvent
from shared.stage.service import Failures
from shared.transport.wire import Decoder, encode

CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, OmniRelayError) and value.__module__ == errors.__name__
]


def test_every_error_has_a_code_of_its_own():
    codes = [error.__dict__.get("code") for error in CLASSES]
    assert len(CLASSES) > 20
    assert None not in codes
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("error", CLASSES)
def test_a_code_is_a_lower_case_word_that_fits_in_a_message(error):
    assert error.code.replace("_", "").isalpha()
    assert error.code == error.code.lower()
    failed = RequestFailed(request_id="a", stage="talker", code=error.code, message="")
    assert Decoder[RequestFailed](StageEvent).decode(encode(failed)) == failed


def test_an_error_of_a_request_is_not_one_of_a_message():
    """The stage loop tells the two apart by their base classes."""
    for error in CLASSES:
        assert not (issubclass(error, RequestError) and issubclass(error, MessageError))
        assert error.__doc__


def test_whatever_is_raised_for_one_request_is_its_own_failure(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    full = QueueFullError("no room")
    with failures.only("full"):
        raise full
    assert not caplog.records, "the loop logs what it is told"
    with failures.only("odd"):
        raise KeyError("no such thing")
    with failures.only("good"):
        pass
    assert failures["full"] is full
    assert isinstance(failures["odd"], StageFailedError)
    assert "KeyError('no such thing')" in str(failures["odd"])
    assert failures.keys() == {"full", "odd"}
    (record,) = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    assert "request odd" in record.message


def test_who_is_told_to_end_ends() -> None:
    with pytest.raises(KeyboardInterrupt), Failures().only("any"):
        raise KeyboardInterrupt
