"""The outputs of preparations, compared without times; and a corpus with columns, prepared to each of them."""

import hashlib
import re
from pathlib import Path
from typing import Any

from forebay.prepare import PrepareResult
from support.preparing import prepare, write_jsonl

RECORD = ".progress.json"
"""The record of a run, which has times alone."""
OUTPUTS = ("arrow", "jsonl", "litdata", "mds", "parquet", "webdataset", "megatron", "dataset")
RECIPE = {
    "name": "d",
    "read": {"columns": {"quality": "number", "licence": "text"}},
    "dedup": {"exact": True, "lines": True},
    "slice": {"shuffle": True, "seed": 3},
    "tokenize": {"tokenizer": "bytes"},
}


def content(path: Path) -> bytes:
    """Return a file's bytes; of a report's page without the section of times."""
    data = path.read_bytes()
    return re.sub(rb'<section id="times">.*?</section>', b"", data, flags=re.S) if path.name == "report.html" else data


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a directory by its path from there, without the record of the run."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(folder).as_posix(): content(path) for path in files}


def hashes(folder: Path) -> dict[str, str]:
    """Return the same as SHA-256."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in contents(folder).items()}


def output(folder: Path) -> dict[str, str]:
    """Return the files of an output by their hashes, without what describes the inputs and the run."""
    return {name: digest for name, digest in hashes(folder).items() if not name.startswith((".", "report"))}


def make_corpus(folder: Path) -> None:
    """Write three files with documents that repeat, and with lines that do."""
    for k in range(3):
        rows = []
        for i in range(40):
            text = f"document {k} {i} äöü “x”\nline {i % 7} of words that repeat, in some\n" * (1 + i % 3)
            row = {"id": f"{k}-{i}", "url": f"http://a/{k}/{i}", "text": text}
            row |= {"quality": i / 7} if i % 3 else {}
            rows.append(row | ({"licence": "mit"} if i % 2 else {}))
        write_jsonl(folder / f"{k}.jsonl", [*rows, {"id": "same", "text": "one document that all have"}])


def prepare_output(to: str, corpus: Path, out: Path | str, tables: dict | None = None, **more: Any) -> PrepareResult:
    """Prepare a corpus as one output, with deduplication and in another order."""
    return prepare(corpus, out, to=to, tokenizer=None, settings={**RECIPE, **(tables or {})}, **more)


def make_outputs(folder: Path) -> None:
    """Write each output by its name, with the ids of its documents, and the corpus as `in`."""
    (folder / "in").mkdir()
    make_corpus(folder / "in")
    for to in OUTPUTS:
        prepare_output(to, folder / "in", folder / to, write_ids=folder / f"{to}.ids")
