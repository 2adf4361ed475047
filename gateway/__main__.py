"""``python -m gateway [--config FILE]``: run the gateway."""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from gateway.process import run
from shared.config import load_config
from shared.errors import OmniRelayError
from shared.log import configure_logging


def main() -> int:
    """Run until SIGTERM or SIGINT.

    Returns:
        0, or 1 if the gateway could not start.
    """
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Run the gateway.")
    parser.add_argument("--config", type=Path, help="the stack's YAML file")
    arguments = parser.parse_args()
    # Nothing has been read that could be read again; the running gateway has a handler.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        config = load_config(arguments.config)
        configure_logging("gateway", config.log_level)
        asyncio.run(run(config))
    except OmniRelayError as error:
        configure_logging("gateway", "error")
        logging.getLogger(__name__).error("%s: %s", error.code, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
