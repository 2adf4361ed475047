"""What ``python -m benchmarks`` can measure; each scenario gives rows of figures."""
