"""The four trained parts of the model, and the training loop that they share."""
