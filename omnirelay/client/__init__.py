"""The client library; :mod:`omnirelay` exports its public names."""
