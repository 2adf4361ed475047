"""The thinker of Qwen2.5-Omni: its rows, and its track for the talker."""
