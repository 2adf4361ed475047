"""The gateway: request lifecycle, TCP server, client library, command line."""
