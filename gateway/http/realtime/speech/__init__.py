"""The audio of a session: its formats, and what was heard of an answer."""
