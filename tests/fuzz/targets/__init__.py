"""What is fuzzed, a module each: ``check(data)`` raises for a fault, ``seeds()`` is what to begin with."""
