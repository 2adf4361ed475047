"""The thinker of Qwen3-Omni: its rows, and its track for the talker."""
