"""What is fuzzed: a module for each target, with ``check(data)``, which raises for a fault, and ``seeds()``."""
