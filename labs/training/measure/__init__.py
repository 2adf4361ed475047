"""Evaluation of the trained parts on held-out data, and the speech recognizer that it uses."""
