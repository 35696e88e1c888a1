"""Tokenizers by name, encoders of text, and the rendering of conversations."""
