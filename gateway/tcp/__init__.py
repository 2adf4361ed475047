"""The TCP protocol for clients, one connection each."""
