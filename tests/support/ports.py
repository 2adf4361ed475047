"""Free ports for what tests start.

Not asked of the kernel: it hands out those of its own range to others, too, in the seconds that a stage takes
until it listens.
"""

import itertools
import os
import random
import socket
from contextlib import closing, suppress
from typing import Final

_PORTS: Final = range(20_000, 32_000)
"""Below the range that Linux takes ports from, for connections and for listeners on port 0."""
_WORKERS: Final = 8
_candidates: "itertools.cycle[int] | None" = None


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on, none of them given before."""
    global _candidates  # noqa: PLW0603 - no port twice in a process
    if _candidates is None:
        ours = _ours()
        first = random.randrange(len(ours))
        _candidates = itertools.cycle([*ours[first:], *ours[:first]])
    return list(itertools.islice(filter(_is_free, _candidates), count))


def _ours() -> range:
    """A part of the range for each worker of one run."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return _PORTS[int(worker) % _WORKERS :: _WORKERS]


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return True
    return False


def has_ipv6() -> bool:
    """Whether this machine has the loopback of IPv6."""
    try:
        with closing(socket.create_server(("::1", 0), family=socket.AF_INET6)):
            return True
    except OSError:
        return False
