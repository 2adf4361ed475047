"""The gateway alone, between imitated stages and light clients, each pinned to cores of its own."""
