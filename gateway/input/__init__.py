"""What a request brings: messages to a prompt, media counted and fetched, tokens back to text."""
