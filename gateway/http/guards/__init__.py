"""What a request passes before its endpoint: log, host, origin, proxy and key."""
