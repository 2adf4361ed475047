"""The gateway over HTTP: the OpenAI API, health, metrics."""
