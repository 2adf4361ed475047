"""Endpoints for whoever runs the gateway: health, metrics, requests."""
