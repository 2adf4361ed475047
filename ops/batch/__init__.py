"""``omnirelay batch``: a file of prompts, answered into a folder; it resumes where it stopped."""

from ops.batch.command import run

__all__ = ["run"]
