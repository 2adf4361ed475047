"""How much a process takes from another one, unless it is configured otherwise."""

from typing import Final

DEFAULT_WINDOW_BYTES: Final = 64 * 2**20
DEFAULT_MAX_PAYLOAD_BYTES: Final = 100 * 10**6
