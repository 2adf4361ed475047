"""``python -m gateway [--config FILE]``: run the gateway."""

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path

# Read when NumPy is loaded.  The matrices of the network that finds speech are small: further threads would
# cost more than they gain.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from gateway.process import run
from omnirelay.errors import OmniRelayError
from shared.config import load_config, tell_ignored
from shared.ending import leave_on_signals, limit_end, run_to_end
from shared.families import DESCRIPTIONS, Descriptions
from shared.log import configure_logging

log = logging.getLogger(__name__)


def main(families: Descriptions = DESCRIPTIONS) -> int:
    """Run until SIGTERM or SIGINT; return 1 if the gateway could not start, else 0."""
    # Until the running gateway installs its own handlers.
    leave_on_signals()
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Run the gateway.")
    parser.add_argument("--config", type=Path, help="the stack's YAML file")
    arguments = parser.parse_args()
    # There is nothing to reload yet.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    configure_logging("gateway", "info")
    try:
        config = load_config(arguments.config)
        configure_logging("gateway", config.log_level, config.log_format)
        tell_ignored()
        # Never closed: that would wait for threads in DNS look-ups, which can take minutes.
        asyncio.Runner().run(run(config, families))
    except OmniRelayError as error:
        limit_end()
        log.error("%s: %s", error.code, error)
        return 1
    return 0


if __name__ == "__main__":
    run_to_end(main)
