"""Queues, quotas and budgets that are fair among clients.  Knows neither requests nor stages."""
