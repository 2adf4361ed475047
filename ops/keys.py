"""``omnirelay keys``: key pairs for the sockets between the processes."""

import argparse

from omnirelay.cli.output import say
from shared.messages import ROLES
from shared.transport.keys import make_keys

EXPLANATION = """
Every process needs all *.key files, which are public, and its own .key_secret. Copy those of
other machines there over a private channel, and keep no second copy. Then set, for all processes or none,
    security.keys: {directory}
or where the files are on that machine."""


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        OmniRelayError: There are keys already, or they cannot be written.
    """
    directory = arguments.directory
    make_keys(directory, arguments.force)
    say(f"made in {directory}:")
    for role in ROLES:
        say(f"  {role}.key, {role}.key_secret")
    say(EXPLANATION.format(directory=directory.absolute()))
    return 0
