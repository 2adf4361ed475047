"""Connections of the client to gateways."""
