"""The talker of Qwen2.5-Omni: a Qwen2 decoder over codec tokens."""
