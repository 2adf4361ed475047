"""The process of a stage: its loop, heartbeats, health and metrics.

Loads neither PyTorch nor vLLM; what a stage computes is its service's business.
"""
