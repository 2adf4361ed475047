"""``omnirelay``, and ``python -m omnirelay.cli`` where it is not installed."""

import sys
from typing import Final

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells expect it."""


def main() -> int:
    """Run the command line; Ctrl-C ends it without a traceback, also while modules are loaded."""
    try:
        from omnirelay.cli.main import main as run  # noqa: PLC0415 - inside the try

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
