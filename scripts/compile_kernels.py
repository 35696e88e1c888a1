"""Run most stages on a few documents, so that their kernels are compiled once, on all cores, before tests need them."""

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from forebay import ForebayError, prepare_dataset

TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_text()
PAGE = f"<html><head><title>Terms</title></head><body><p>{'</p><p>'.join(TEXT.split(chr(10) * 2))}</p></body></html>"
# Those that take longest first; the pages need the kernels of extraction, the texts do not.
RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    (".html", {"settings": {"extract": {}}}),
    (".txt", {"recipe": "fineweb"}),
    (".txt", {"recipe": "gopher", "settings": {"boilerplate": {}, "lines": {}}}),
    (".txt", {"dedup": ["minhash", "lines", "sentences", "overlap", "substring", "url"]}),
    (".txt", {"recipe": "c4"}),
    (".txt", {"recipe": "wikipedia"}),
    (".txt", {"recipe": "dolma"}),
    (".txt", {"filters": ["code"]}),
)


def compile_stages(run: tuple[str, dict[str, Any]]) -> None:
    """Prepare three documents with these stages."""
    suffix, arguments = run
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "in")
        source.mkdir()
        for i in range(3):
            (source / f"{i}{suffix}").write_text(PAGE if suffix == ".html" else TEXT)
        try:
            prepare_dataset([source], Path(temporary, "out"), tokenizer="bytes", workers=1, **arguments)
        except ForebayError as error:  # Some recipes drop all of it.
            if "got none" not in str(error):
                print(f"compile_kernels: {arguments}: {error}", file=sys.stderr)


def main() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_stages, RUNS))


if __name__ == "__main__":
    main()
