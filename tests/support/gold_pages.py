"""Real articles with the text that people chose as theirs, and how much of it an extracted text has."""

import re
import tarfile
from collections import Counter

from forebay.formats.html import html_to_text
from forebay.formats.http_message import body_text
from support.shared_data import shared_data


def gold_articles(names: set[str]) -> dict[str, tuple[str, str]]:
    """Return the HTML and the gold text of some of readability's test pages, by name."""
    files = {}
    with tarfile.open(shared_data("html/articles.tar.xz")) as archive:
        for member in archive:
            *_, name, file = f"/{member.name}".split("/")
            if name in names and (stream := archive.extractfile(member)) is not None:
                files[name, file] = stream.read()
    return {
        name: (body_text(files[name, "source.html"], "", True), html_to_text(files[name, "expected.html"].decode()))
        for name in sorted(names)
    }


def word_scores(text: str, gold: str) -> tuple[float, float]:
    """Return F1 and precision over words."""
    actual, expected = (Counter(re.findall(r"\w+", part.lower())) for part in (text, gold))
    common = (actual & expected).total()
    return 2 * common / (actual.total() + expected.total()), common / max(1, actual.total())
