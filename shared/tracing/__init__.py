"""Traces of requests: what each process did and when, told to OpenTelemetry if it is configured."""
