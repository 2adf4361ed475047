"""The process of a stage: loop, heartbeats, health, metrics.  Loads neither PyTorch nor vLLM."""
