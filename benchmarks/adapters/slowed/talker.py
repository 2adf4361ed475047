"""``python -m benchmarks.adapters.slowed.talker --config FILE``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("services.talker", run_name="__main__", alter_sys=True)
