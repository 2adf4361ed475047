"""What several server processes share: configuration, messages, transport, the process of a stage.

Imports nothing of ours but :mod:`omnirelay`.  Only ``vllm`` loads PyTorch and vLLM.
"""
