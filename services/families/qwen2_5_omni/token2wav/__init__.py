"""The DiT and the BigVGAN vocoder of Qwen2.5-Omni, and how chunks of many requests run through them."""
