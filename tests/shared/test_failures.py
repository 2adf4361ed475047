"""What is done for one request alone ends that request alone, and is not hidden."""

import logging

import pytest

from omnirelay.errors import QueueFullError, StageFailedError
from shared.stage.service import Failures


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
