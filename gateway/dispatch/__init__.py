"""Stages as the gateway sees them: replicas, placement, retries and aborts.

May import requests; knows no client and no prompt.
"""
