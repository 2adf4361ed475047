"""Check the keys of the sockets between the processes."""

from pathlib import Path
from typing import Final

import zmq

from omnirelay.errors import ConfigError
from ops.doctor.finding import Findings, ok, problem, warning
from shared.config import Config
from shared.config.values import is_local
from shared.transport.keys import ROLES, load_keys, secret_file

CHECK: Final = "keys"


def check_keys(config: Config) -> Findings:
    """Check that the keys are usable, or not needed."""
    if config.security.keys is not None:
        yield from _examine(Path(config.security.keys))
    elif all(is_local(address) for address in config.inner_addresses().values()):
        yield ok(CHECK, "none, and none are needed: the processes talk to each other on this machine alone")
    else:
        what = "none: security.internal_network says that nobody else is on the network between the processes"
        advice = "be sure of that, or make keys with `omnirelay keys DIR` and set security.keys"
        yield warning(CHECK, what, advice)


def _examine(directory: Path) -> Findings:
    if not zmq.has("curve"):
        what = "security.keys is set, and this ZeroMQ was built without CURVE"
        yield problem(CHECK, what, "install pyzmq's own wheel: pip install --only-binary :all: pyzmq")
        return
    here = [role for role in ROLES if secret_file(directory, role).exists()]
    if not here:
        what = f"{directory} has no .key_secret file: no process can start here"
        yield problem(CHECK, what, "make keys with `omnirelay keys DIR`, or copy those that you have")
    for role in here:
        try:
            load_keys(directory, role)
        except ConfigError as error:
            yield problem(CHECK, str(error), f"the {role} does not start before: docs/security.md")
        else:
            yield ok(
                CHECK, f"the {role} has its keys in {directory}, and only their owner can read the secret one"
            )
