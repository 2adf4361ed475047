"""Middleware: the access log, and the checks of host, origin, proxy and API key."""
