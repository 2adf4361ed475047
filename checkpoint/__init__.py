"""Makes random checkpoints in the released layout."""
