"""What is neither shipped nor needed to serve: the training of the default checkpoint."""
