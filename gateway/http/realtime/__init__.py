"""``/v1/realtime``: conversations over a WebSocket, with OpenAI's events."""
