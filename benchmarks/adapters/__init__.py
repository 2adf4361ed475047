"""Servers that can be measured: each is driven through an :class:`~benchmarks.adapters.base.Adapter`."""
