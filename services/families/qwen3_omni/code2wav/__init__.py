"""Code2wav of Qwen3-Omni: codec frames become audio, as they come."""
