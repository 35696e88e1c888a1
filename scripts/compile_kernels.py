"""Runs most stages on a few pages, so that their kernels are compiled once, before many tests need them at a time."""

import tempfile
from pathlib import Path

from forebay import ForebayError, prepare_dataset

PARAGRAPH = "<p>The river fills the basin in spring, and the wheel below it turns until the end of the summer.</p>"
PAGE = f"<html><head><title>A mill</title></head><body><h1>A mill</h1>{PARAGRAPH * 20}</body></html>"
RUNS = (
    {"recipe": "fineweb"},
    {"recipe": "gopher", "settings": {"boilerplate": {}, "lines": {}}},
    {"recipe": "dolma"},
    {"recipe": "c4"},
    {"recipe": "wikipedia"},
    {"recipe": "code"},
    {"dedup": ["lines", "sentences", "overlap", "substring", "url"]},
)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "in")
        source.mkdir()
        for i in range(3):
            (source / f"{i}.html").write_text(PAGE)
        for i, run in enumerate(RUNS):
            try:
                prepare_dataset([source], Path(temporary, str(i)), tokenizer="bytes", workers=1, **run)
            except ForebayError:  # Some recipes drop all of it.
                continue


if __name__ == "__main__":
    main()
