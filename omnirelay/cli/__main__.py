"""``python -m omnirelay.cli``: the ``omnirelay`` command where it is not installed."""

import sys

from omnirelay.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
