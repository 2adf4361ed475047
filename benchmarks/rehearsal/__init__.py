"""A whole model of a released size, one stage after the other, beside transformers: loads, and is it right.

Nothing here needs more memory than the largest stage, because no two of them are loaded at once.
"""
