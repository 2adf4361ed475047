"""Error codes are words one can rely on, and a process writes one line a record."""

import inspect
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from shared import errors
from shared.errors import (
    BusyError,
    MessageError,
    OmniRelayError,
    PayloadError,
    RequestError,
    UnknownSpeakerError,
)
from shared.log import configure_logging
from shared.messages import RequestFailed, StageEvent
from shared.wire import Decoder, encode

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


@pytest.fixture
def logging_state() -> Iterator[None]:
    """Give logging back as it was: pytest and the other tests have handlers and levels of their own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in ("services", "gateway", "shared", "checkpoint")}
    with warnings.catch_warnings():
        yield
    root.handlers = handlers
    root.setLevel(level)
    for name, value in levels.items():
        logging.getLogger(name).setLevel(value)
    logging.getLogger("__main__").setLevel(logging.NOTSET)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_record_is_one_line_with_the_name_of_the_process(logging_state, capsys):
    configure_logging("talker", "info")
    logging.getLogger("shared.engine.stage").info("ready on %s", "tcp://127.0.0.1:5563")
    (line,) = lines(capsys)
    assert line.endswith(" INFO talker shared.engine.stage: ready on tcp://127.0.0.1:5563")


@pytest.mark.parametrize(
    ("level", "ours", "libraries"),
    [("debug", 4, 3), ("info", 3, 1), ("warning", 2, 1), ("error", 1, 1)],
)
def test_our_levels_are_as_configured_and_libraries_are_heard_from_errors_on(
    logging_state, capsys, level, ours, libraries
):
    configure_logging("thinker", level)
    for name, heard in (("services.thinker", ours), ("gateway.core", ours), ("vllm.engine", libraries)):
        for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(severity, "said")
        assert len(lines(capsys)) == heard, name


def test_configuring_twice_does_not_write_twice(logging_state, capsys):
    for _ in range(2):
        configure_logging("thinker", "info")
    logging.getLogger("shared").info("once")
    assert len(lines(capsys)) == 1
    assert logging.getLogger().handlers[0].stream is sys.stderr  # type: ignore[attr-defined]
