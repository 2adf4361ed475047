"""The third stage: codec ids in, speech out."""
