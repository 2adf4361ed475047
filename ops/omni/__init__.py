"""Offline inference from Python: a client with a stack of its own.  Programs import ``omnirelay.server``."""
