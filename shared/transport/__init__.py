"""Messages between processes: encoding, sockets, queues bounded in bytes, keys.

Knows no model and no engine.
"""
