"""What the user says: appended audio, the prompt that is computed while it comes, and its transcript."""
