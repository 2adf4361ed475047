"""The child processes that decode files, and the pipe to them."""
