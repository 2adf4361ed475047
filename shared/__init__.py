"""What two or more processes of a server need: configuration, messages, transport, a stage's process.

Imports nothing of ours but :mod:`omnirelay`.  Only ``vllm`` loads PyTorch and vLLM.
"""
