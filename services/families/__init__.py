"""The model families: all that depends on the architecture of a checkpoint, a package for each.

Importing a family loads neither PyTorch nor vLLM; what a stage calls on it does.
"""
