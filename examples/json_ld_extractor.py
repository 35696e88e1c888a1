"""An extractor of your own: the article that a page gives in JSON-LD, else what Forebay's extractor gives.

    [extract]
    extractor = "json_ld_extractor:JsonLd"
    options = {min_words = 50}

A package makes it known by a name, by one line of its pyproject.toml:

    [project.entry-points."forebay.extractors"]
    json_ld = "json_ld_extractor:JsonLd"
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from forebay.prepare.extract import extract_html

_SCRIPT = re.compile(r"""<script[^>]{0,999}application/ld\+json[^>]{0,999}>(.*?)</script>""", re.DOTALL | re.IGNORECASE)


class JsonLd:
    """Reads `articleBody` of the first object that has one, of at least `min_words` words."""

    version = 1

    def __init__(self, min_words: int = 20) -> None:
        self.min_words = min_words

    def extract(self, html: str, markdown: bool) -> str:
        for text in self._bodies(html):
            if len(text.split()) >= self.min_words:
                return text.strip()
        return extract_html(html, markdown=markdown)

    def _bodies(self, html: str) -> Iterator[str]:
        for script in _SCRIPT.findall(html):
            try:
                data: Any = json.loads(script)
            except (ValueError, RecursionError):
                continue
            for item in data if isinstance(data, list) else [data]:
                body = item.get("articleBody") if isinstance(item, dict) else None
                if isinstance(body, str):
                    yield body


if __name__ == "__main__":
    page = '<script type="application/ld+json">{"articleBody": "The words of the article."}</script><p>Menu</p>'
    print(JsonLd(min_words=3).extract(page, False))
