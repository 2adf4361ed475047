"""``python -m benchmarks.adapters.slowed.token2wav --config FILE``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("benchmarks.adapters.stamped_token2wav", run_name="__main__", alter_sys=True)
