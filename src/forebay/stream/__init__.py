"""Other people's data, tokenized while it is streamed."""

from forebay.stream.lane import StreamOptions
from forebay.stream.text_stream import TextStream

__all__ = ["StreamOptions", "TextStream"]
