"""``python -m benchmarks.adapters.slowed.thinker --config FILE``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("services.thinker", run_name="__main__", alter_sys=True)
