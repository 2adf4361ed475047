"""The ``omnirelay`` command."""

from omnirelay.cli.main import main

__all__ = ["main"]
