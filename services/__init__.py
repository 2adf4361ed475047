"""The stages of the model, one package and one process each."""
