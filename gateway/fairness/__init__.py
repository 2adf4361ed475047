"""Queues, quotas and budgets that keep one client from having everything.

Knows neither requests nor stages.
"""
