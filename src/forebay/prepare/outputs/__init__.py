"""What a preparation writes: datasets of tokens or rows, text, or a language model."""
