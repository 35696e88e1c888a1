"""Archives read and wikitext to text, MB a CPU second, beside fastwarc, warcio and mwparserfromhell.

Run: `FOREBAY_TEST_DATA=../shared/data python -m benchmarks.prepare.archives`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

DATA = Path(os.environ.get("FOREBAY_TEST_DATA", Path(__file__).parents[3] / "shared/data"))


def timed(run: Callable[[], int]) -> tuple[float, int]:
    """CPU seconds of a second run, and what it counted."""
    run()
    start = time.process_time()
    counted = run()
    return time.process_time() - start, counted


def archives() -> None:
    """Prints how fast archives are read: our documents as text, both libraries' raw blocks."""
    import tempfile

    from fastwarc.warc import ArchiveIterator
    from warcio.archiveiterator import ArchiveIterator as WarcioIterator

    from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
    from forebay.formats.warc import read_raw
    from forebay.prepare.inputs import read_split

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.warc.gz"
        path.write_bytes((DATA / "warc/fastwarc/warcfile.warc.gz").read_bytes() * 50)
        source, options = InputFile(str(path), "a", "warc", "gz", path.stat().st_size, ""), ReadOptions()

        def warcio() -> int:
            with path.open("rb") as file:
                return sum(len(record.content_stream().read()) for record in WarcioIterator(file))

        def fastwarc() -> int:
            with path.open("rb") as file:
                return sum(len(record.reader.read()) for record in ArchiveIterator(file))

        runs: dict[str, Callable[[], int]] = {
            "forebay, decoded text": lambda: sum(len(r.text) for r in read_split(InputSplit((source,)), options)),
            "forebay, raw blocks": lambda: sum(len(r.block) for r in read_raw(source, options)),
            "fastwarc, raw blocks": fastwarc,
            "warcio, raw blocks": warcio,
        }
        print("\nArchives (.warc.gz), unpacked MB a CPU second")
        for name, run in runs.items():
            seconds, _ = timed(run)
            print(f"{name:24}{0.5278 * 50 / seconds:8.0f}")


def wikitext() -> None:
    """Prints how fast wikitext becomes text; mwparserfromhell on the first articles only."""
    import bz2
    import html

    from forebay.formats.wikitext import to_text

    (path,) = (DATA / "wikipedia").glob("enwiki-latest*.bz2")
    dump = bz2.decompress(path.read_bytes()).decode()
    pages = [html.unescape(markup) for markup in re.findall(r"<text[^>]*>([^<]*)</text>", dump)]
    pages = [page for page in pages if not page.lower().startswith("#redirect")]
    first = pages[:10]
    own, _ = timed(lambda: sum(len(to_text(page)) for page in pages))
    print("\nWikitext, MB a CPU second")
    print(f"{'forebay':24}{_megabytes(pages) / own:8.1f}")
    try:
        import mwparserfromhell
    except ImportError:
        print("mwparserfromhell is not installed: left out")
        return
    peer, _ = timed(lambda: sum(len(mwparserfromhell.parse(page).strip_code()) for page in first))
    print(f"{'mwparserfromhell':24}{_megabytes(first) / peer:8.1f}")


def _megabytes(pages: Sequence[str]) -> float:
    return sum(len(page.encode()) for page in pages) / 1e6


if __name__ == "__main__":
    archives()
    wikitext()
