"""Turn detection: when the user of a realtime session begins and stops to speak."""
