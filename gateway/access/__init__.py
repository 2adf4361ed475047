"""Who may use the gateway: API keys, the limits of each, TLS."""
