"""Input of a request: prompts, media, and tokens back to text."""
