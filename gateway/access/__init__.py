"""Access control: API keys and their limits, connection limits, TLS."""
