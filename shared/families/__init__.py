"""What is known of the model families without their engines, a module for each."""
