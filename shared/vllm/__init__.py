"""What the stages' vLLM engines have in common: building them, scheduling, conditioning rows in KV memory.

The only room of shared that loads PyTorch, vLLM and transformers.
"""
