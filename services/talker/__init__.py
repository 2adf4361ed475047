"""The talker: conditioning rows in, codec tokens out."""
