"""The stages as the gateway sees them: which replicas there are, who takes a request, who drops it.

May import requests; knows no client and no prompt.
"""
