"""Other people's data, tokenized while it is streamed."""
