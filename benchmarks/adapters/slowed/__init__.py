"""The processes of the stack, with speech that lasts several times as long.

To the schedulers, and to whoever listens, the machine is so many times as fast: for models that it computes
more slowly than they speak.  What is computed is the same.
"""

import os
from typing import Final

from omnirelay import values

VARIABLE: Final = "BENCHMARKS_SLOWER"
SLOWER: Final = int(os.environ.get(VARIABLE, "1"))
if values.SAMPLE_RATE % SLOWER:
    raise ValueError(f"{VARIABLE} must divide {values.SAMPLE_RATE}, {SLOWER} does not")
# Before any other module imports the rate.
values.SAMPLE_RATE //= SLOWER  # type: ignore[misc]
