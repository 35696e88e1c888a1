"""A corpus for measurements: real prose cut and joined into documents of a few kB, with known copies among them.

Hides: where the prose comes from: the books, plays and dumps below `FOREBAY_TEST_DATA`. Deterministic: the same
files and size give the same bytes.
"""

from __future__ import annotations

import bz2
import html
import json
import os
import random
import re
from pathlib import Path
from pydoc_data.topics import topics

DUPLICATES = 0.05
NEAR_DUPLICATES = 0.05


def data_folder() -> Path:
    """Where the real data lies.

    Raises:
        SystemExit: If it is not there.
    """
    folder = Path(os.environ.get("FOREBAY_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    if not folder.is_dir():
        raise SystemExit("benchmarks: set FOREBAY_TEST_DATA to a folder with books/, shakespeare/, wikipedia/ …")
    return folder


def passages(folder: Path) -> list[str]:
    """Paragraphs of real prose, in a fixed order."""
    texts = []
    for path in sorted([*folder.glob("books/gutenberg_en/*"), *folder.glob("shakespeare/works/*")]):
        texts += re.split(r"\n\s*\n", path.read_text("utf-8", errors="replace"))
    for path in sorted(folder.glob("wikipedia/*.bz2")):
        plain = bz2.decompress(path.read_bytes()).decode("utf-8", "replace")
        texts += re.split(r"\n+", html.unescape(re.sub(r"\{\{[^{}]*\}\}|\[\[|\]\]|<[^>]*>|'''?", "", plain)))
    for path in sorted(folder.glob("stackexchange/*/Posts.xml")):
        bodies = re.findall(r' Body="([^"]*)"', path.read_text("utf-8"))
        texts += [re.sub(r"<[^>]*>", "", html.unescape(html.unescape(body))) for body in bodies]
    return [text.strip() for text in texts if len(text.strip()) > 40]


def prose() -> list[str]:
    """Paragraphs of the sample data; without it, words of Python's own documentation."""
    try:
        return passages(data_folder())
    except SystemExit:
        words = re.findall(r"[A-Za-z]{2,}", " ".join(topics.values()))
        return [" ".join(words[start : start + 60]) + "." for start in range(0, len(words), 60)]


def make_corpus(path: Path, num_bytes: int, seed: int = 0) -> int:
    """Write JSON lines of `id` and `text`; the number of documents.

    A document is a run of 3 to 15 passages in which every second one is drawn from anywhere, so that no two share
    much; one in twenty is an exact copy of an earlier one and one in twenty differs from it in a few words.
    """
    pool, chance = prose(), random.Random(seed)
    documents: list[str] = []
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            draw = chance.random()
            if documents and draw < DUPLICATES:
                text = chance.choice(documents)
            elif documents and draw < DUPLICATES + NEAR_DUPLICATES:
                words = chance.choice(documents).split(" ")
                for _ in range(max(1, len(words) // 150)):
                    words[chance.randrange(len(words))] = chance.choice(["mill", "race", "wheel", "water"])
                text = " ".join(words)
            else:
                start = chance.randrange(len(pool))
                run = [
                    pool[(start + i) % len(pool)] if i % 2 else chance.choice(pool)
                    for i in range(chance.randint(3, 15))
                ]
                text = "\n\n".join(run)[: chance.randint(2000, 12000)]
            if len(documents) < 20_000:
                documents.append(text)
            written += file.write(json.dumps({"id": f"doc-{len(documents)}-{written}", "text": text}) + "\n")
    return len(documents)
