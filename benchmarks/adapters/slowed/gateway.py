"""``python -m benchmarks.adapters.slowed.gateway --config FILE``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)
