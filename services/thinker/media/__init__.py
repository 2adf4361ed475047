"""Turns the bytes of media files into arrays, in processes of their own."""
