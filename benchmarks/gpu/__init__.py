"""What has to be shown on a GPU, part by part, by one command: ``make gpu``."""
