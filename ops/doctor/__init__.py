"""``omnirelay doctor``: what is wrong with a set-up, and what to do."""

from ops.doctor.command import run

__all__ = ["run"]
