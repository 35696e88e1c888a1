"""Main text of HTML pages: the stage `[extract]`, and the extractors that it may use.

Forebay's own reads a page once into blocks of text (`scan`), describes each block and what is around it (`features`),
and keeps those that a learned model takes for main text (`model`); `layout` writes them as lines or Markdown. Start
reading at `extractors`. `trafilatura` and `resiliparse` may be chosen in its place, and any other by an entry point of
`forebay.extractors`.
"""

from forebay.prepare.extract.extractors import Extractor, extract_html

__all__ = ["Extractor", "extract_html"]
