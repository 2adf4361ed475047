"""The endpoints of OpenAI's API: requests read, answers written."""
