"""The ``omnirelay`` command."""
