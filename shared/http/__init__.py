"""HTTP connections with limits, for the gateway's servers and a stage's endpoint."""

from typing import Final

BACKLOG: Final = 256
"""Connections that the kernel queues."""
