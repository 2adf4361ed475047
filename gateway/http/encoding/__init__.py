"""Speech encoded to wav, mp3, flac, opus, aac and PCM, incrementally and on threads."""
