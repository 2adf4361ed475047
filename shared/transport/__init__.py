"""Messages between the processes: wire format, queues with byte credits, sockets, CURVE."""
