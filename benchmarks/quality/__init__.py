"""How good a speaking checkpoint's answers are, through the running stack: what it says, and how it sounds.

``python -m benchmarks.quality --help``; docs/training.md says what the figures mean.
"""
