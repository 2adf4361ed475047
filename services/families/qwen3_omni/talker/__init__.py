"""The talker of Qwen3-Omni: a decoder over the first codebook, and a predictor of the others."""
