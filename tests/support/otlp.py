"""What tests of traces wait for."""

import threading
import time

from benchmarks.measure.otlp import DEADLINE_S
from shared.tracing.otel import LAST_SPANS


def wait_for_senders() -> None:
    """Wait until no thread of an ended tracer is left: other tests would feel it."""
    deadline = time.monotonic() + DEADLINE_S
    while any(thread.name == LAST_SPANS for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
