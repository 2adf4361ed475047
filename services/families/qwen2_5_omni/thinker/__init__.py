"""The thinker of Qwen2.5-Omni: its rows, its track for the talker, its media."""
