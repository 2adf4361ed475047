"""Speech to files: wav, mp3, flac, opus, aac and PCM, piece by piece, on threads."""
