"""How tokens are sampled: seeds, top-k with top-p, the repetition penalty."""
