"""What is fuzzed, a module each: ``check(data)`` raises for a fault.

Inputs to begin with are in the corpora; frames, which carry their build's version, are made by ``seeds()``.
"""
