"""The TCP protocol for clients."""
