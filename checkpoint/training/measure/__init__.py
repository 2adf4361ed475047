"""How good the trained parts are on what they never saw; an independent recognizer."""
