"""The thinker: text, images, audio and video in; text and conditioning rows out."""
