"""What is in a file: its format, and its audio, images or frames."""
