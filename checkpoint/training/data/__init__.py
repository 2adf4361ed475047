"""What the training learns from: sentences, speech, recordings to hear, drawn images; all made here."""
