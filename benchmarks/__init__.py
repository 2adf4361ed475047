"""Benchmarks: OmniRelay beside transformers' own ``generate``, on one machine, in one run.

``python -m benchmarks --help`` lists what can be measured; README.md says what the numbers mean.
"""
