"""Other people's data, tokenized while it is streamed."""

from forebay.stream.text_stream import TextStream

__all__ = ["TextStream"]
