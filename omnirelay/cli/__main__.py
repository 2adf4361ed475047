"""``omnirelay``, and ``python -m omnirelay.cli`` where it is not installed."""

import os
import sys
from typing import Final

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells expect it."""


def main() -> int:
    """Run the command line; Ctrl-C ends it without a traceback, also while modules are loaded."""
    if __name__ != "__main__":
        # An installed script looks for no modules in the working folder; nor shall its processes.
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        from omnirelay.cli.main import main as run  # noqa: PLC0415 - inside the try

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
