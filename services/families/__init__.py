"""All that depends on a checkpoint's architecture, a package for each family; imports no PyTorch or vLLM."""
