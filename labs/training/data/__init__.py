"""Training data: sentences, speech, recordings of questions, drawn images; all synthesized here."""
