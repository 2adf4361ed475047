"""What a microphone hears: speech, the echo of answers, and whether a speaker has finished."""
