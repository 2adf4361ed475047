"""Token2wav: codec tokens in, waveform out."""
