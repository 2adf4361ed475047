"""Error codes are words one can rely on."""

import inspect

import pytest

from omnirelay import errors
from omnirelay.errors import (
    BusyError,
    MessageError,
    OmniRelayError,
    PayloadError,
    RequestError,
    UnknownSpeakerError,
)
from shared.messages import RequestFailed, StageEvent
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


def test_errors_carry_what_their_handlers_need():
    payload = PayloadError("rows.dtype", "'float64' is not allowed")
    assert (payload.field, str(payload)) == ("rows.dtype", "rows.dtype: 'float64' is not allowed")
    busy = BusyError("too many requests", retry_after_ms=250)
    assert (busy.retry_after_ms, str(busy), busy.code) == (250, "too many requests", "busy")
    with pytest.raises(RequestError, match="no voice"):
        raise UnknownSpeakerError("no voice Bob")
