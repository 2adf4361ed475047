"""Traces of requests, exported by OpenTelemetry if it is configured."""
