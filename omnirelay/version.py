"""The version of OmniRelay that runs here."""

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed distribution's version."""
    try:
        return metadata.version("omnirelay")
    except metadata.PackageNotFoundError:
        return "(source tree, not installed)"
