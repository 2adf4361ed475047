"""What a run consists of: the scenarios, and single parts measured alone."""
