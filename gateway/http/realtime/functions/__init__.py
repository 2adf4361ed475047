"""Functions that the model may call in a session."""
