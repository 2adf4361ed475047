"""The endpoints of OpenAI's API."""
