"""What the harness says while it works."""

import sys
import time

_STARTED = time.monotonic()


def tell(text: str) -> None:
    """Say how far the run is, on standard error."""
    sys.stderr.write(f"[{time.monotonic() - _STARTED:5.0f} s] {text}\n")
    sys.stderr.flush()
