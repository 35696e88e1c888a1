"""Other people's data, tokenized while it is streamed."""

from forebay.stream.text_stream import StreamOptions, TextStream

__all__ = ["StreamOptions", "TextStream"]
