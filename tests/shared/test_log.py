"""A process writes one line a record, in one of two forms, and waits for nobody who should read it."""

import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from shared.log import configure_logging, limited, of_request
from shared.log.repeats import BURST, INTERVAL_S, Repeats

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"


@pytest.fixture
def logging_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give logging back as it was: pytest and the other tests have handlers and levels of their own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in ("services", "gateway", "shared", "checkpoint")}
    for owner, name in ((sys, "stdout"), (sys, "stderr"), (sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    with warnings.catch_warnings():
        yield
    logging.captureWarnings(False)
    root.handlers = handlers
    root.setLevel(level)
    for name, value in levels.items():
        logging.getLogger(name).setLevel(value)
    logging.getLogger("__main__").setLevel(logging.NOTSET)


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    handler: Any = logging.getLogger().handlers[0]
    handler.flush()
    # flush() waits no longer than a process may take to end, which on a busy machine is too short.
    assert handler.writer.flush(60)
    captured = capfd.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_record_is_one_line_with_its_time_and_the_name_of_the_process(logging_state, capfd):
    configure_logging("talker", "info")
    logging.getLogger("shared.stage.loop").info("ready on %s, %s", "tcp://a:5", "Authorization: Basic c2Vj")
    (line,) = lines(capfd)
    told = r"ready on tcp://a:5, Authorization: Basic \*\*\*"
    assert re.fullmatch(f"{STAMP} INFO talker shared.stage.loop: {told}", line)


def test_a_record_is_one_object_with_its_request_and_its_exception(logging_state, capfd):
    configure_logging("talker", "info", "json")
    try:
        raise ValueError("no \u2028 sense\n")
    except ValueError:
        logging.getLogger("services.talker").exception("it failed", extra=of_request("ab12"))
    (line,) = lines(capfd)
    told: dict[str, Any] = json.loads(line)
    assert re.fullmatch(STAMP, told.pop("ts"))
    assert "ValueError: no" in told.pop("exception")
    assert told == {
        "level": "error",
        "process": "talker",
        "logger": "services.talker",
        "message": "it failed",
        "request_id": "ab12",
    }


@pytest.mark.parametrize(
    ("level", "ours", "libraries"), [("debug", 4, 3), ("info", 3, 1), ("warning", 2, 1), ("error", 1, 1)]
)
def test_our_levels_are_as_configured_and_libraries_are_heard_from_errors_on(
    logging_state, capfd, level, ours, libraries
):
    configure_logging("thinker", level)
    for name, heard in (("services.thinker", ours), ("gateway.manager", ours), ("vllm.engine", libraries)):
        for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(severity, "said")
        assert len(lines(capfd)) == heard, name


def test_configuring_twice_does_not_write_twice(logging_state, capfd):
    for _ in range(2):
        configure_logging("thinker", "info")
    logging.getLogger("shared").info("once")
    assert len(lines(capfd)) == 1


CODE = """
import logging, sys, warnings
from shared.log import configure_logging
configure_logging("gateway", "debug", "json")
print("printed", end="\\r")
sys.stderr.write("half ")
sys.stderr.write("a line\\n")
warnings.warn("old")
logging.getLogger("uvicorn.error").warning("from a library")
raise RuntimeError(" ".join(["words", "of", "a", "client"]))
"""


def test_whatever_a_process_writes_has_the_same_form():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert [each["logger"] for each in told] == [
        "stdout",
        "stderr",
        "py.warnings",
        "uvicorn.error",
        "shared.log",
    ]
    assert [each["message"] for each in told[:2]] == ["printed", "half a line"]
    assert "RuntimeError" in told[-1]["exception"]
    assert "words of a client" not in done.stderr


def test_repetitions_that_others_cause_are_counted(logging_state, capfd):
    configure_logging("gateway", "info")
    log = logging.getLogger("gateway.access.access")
    for number in range(1000):
        limited(log).warning("hung up on client %d", number)
        log.info("request %d completed", number)
        logging.getLogger("asyncio").error("out of files")
    told = lines(capfd)
    for words, logger in (("hung up on client", "gateway.access.access"), ("out of files", "asyncio")):
        *some, last = [line for line in told if words in line]
        assert len(some) == BURST
        assert f" {logger}: {1000 - BURST} more like this in {INTERVAL_S:.0f} s, the last: {words}" in last
    assert len([line for line in told if "completed" in line]) == 1000


def test_arguments_that_cannot_be_written_end_neither_their_caller_nor_the_log(logging_state, capfd):
    configure_logging("talker", "info")
    log = logging.getLogger("services.talker")
    log.info("%d codes", "many")
    for _ in range(BURST + 1):
        limited(log).info("%d rows", "no")
    # Their tracebacks are nearly as many lines as may wait.
    handler: Any = logging.getLogger().handlers[0]
    assert handler.writer.flush(60)
    log.info("the next line")
    told = lines(capfd)
    assert [line for line in told if line.endswith("the next line")]
    assert any("services.talker" in line or "'many'" in line for line in told)
    assert any("'no'" in line for line in told)


def test_the_thread_of_the_log_is_replaced_if_it_dies(logging_state, capfd, monkeypatch):
    configure_logging("talker", "info")
    log = logging.getLogger("services.talker")
    handler: Any = logging.getLogger().handlers[0]
    died = threading.Event()

    def fail(count: int) -> str:
        died.set()
        raise ZeroDivisionError

    monkeypatch.setattr(handler.writer, "_notice", fail)
    handler.writer._unsaid = 1
    log.info("one")
    assert died.wait(60)
    handler.writer._thread.join(60)
    log.info("two")
    assert any(line.endswith("two") for line in lines(capfd))


def test_kinds_are_told_apart_and_every_interval_begins_anew():
    now = 0.0
    repeats: Repeats[str] = Repeats(lambda: now)
    assert sum(repeats.admit("a", "a") for _ in range(100)) == BURST
    assert repeats.admit("b", "b")
    assert repeats.ended() == []
    now = INTERVAL_S
    assert repeats.ended() == [("a", 100 - BURST)]
    assert repeats.admit("a", "a")


def test_kinds_without_a_bound_count_as_one():
    repeats: Repeats[int] = Repeats()
    admitted = sum(repeats.admit(number, number) for number in range(10_000))
    assert admitted < 300
    assert len(repeats.ended(at_once=True)) == 1
