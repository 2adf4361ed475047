"""Trains the speaking checkpoint: a very small Qwen2.5-Omni that reads, hears and sees a closed world.

Everything that it learns from is made here: sentences (``world``), speech (``synthesis``), pictures
(``images``).  Each part is trained by a module of its own, in the order of ``__main__``, and can be stopped
and resumed at any time.
"""

from shared.vllm.torchvision_compat import declare_missing_operators

# Before anything imports transformers' model classes.
declare_missing_operators()
