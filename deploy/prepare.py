"""See that there is a complete checkpoint before anything that reads it starts: ``python prepare.py``.

Writes the small trained checkpoint if no model is configured and it is missing; fetches a model that is named
by its Hugging Face hub id; only looks at one that is a directory.  It may be run again at any time.
"""

import sys

from omnirelay.cli.output import fail, say
from omnirelay.errors import OmniRelayError
from ops.checkpoint import ensure
from services.families.known import require_family
from shared.checkpoints import resolve_model
from shared.config import load_config


def main() -> int:
    """Prepare the checkpoint.

    Returns:
        0, or 1 with one line that says why there is none.
    """
    try:
        config = load_config()
        ensure(config)
        directory = resolve_model(config)
        require_family(directory)
    except OmniRelayError as error:
        return fail(error)
    say(f"the checkpoint in {directory} is complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
