"""Other people's data, tokenized while it is streamed."""

from __future__ import annotations

from forebay.stream.text_stream import TextStream

__all__ = ["TextStream"]
