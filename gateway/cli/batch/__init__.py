"""``omnirelay batch``: a file of prompts, answered into a folder; it resumes where it stopped."""

from gateway.cli.batch.command import run

__all__ = ["run"]
