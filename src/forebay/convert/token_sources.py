"""What holds tokens, as one stream: datasets of Forebay's own and of every format of `formats`.

Hides: which of them it is. A table's list column is `content.tokens_of_table`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.convert.content import Options, TokenPart, TokenSource
from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import release_pages
from forebay.errors import DatasetError, UsageError
from forebay.formats import ForeignDataset, open_foreign


def tokens_of_dataset(dataset: Dataset) -> TokenSource:
    """An open dataset of layout `tokens`, slice by slice."""
    m = dataset.manifest
    known: dict[str, Any] = {"name": m.name}
    if not isinstance(dataset, ForeignDataset):
        known |= {"tokenizer": m.tokenizer, "vocab_size": m.vocab_size, "eos_id": m.eos_id, "id": dataset.id}
    facts = {key: value for key, value in known.items() if value or (key == "eos_id" and value is not None)}

    def read() -> Iterator[TokenPart]:
        for index in range(dataset.num_slices):
            if isinstance(dataset, ForeignDataset):
                one = dataset.read_slice(index)
                yield TokenPart(one.tokens, one.document_ends)
                dataset.release(index)
            else:
                one = dataset.open_slice(index)
                yield TokenPart(one.tokens, one.document_ends)
                release_pages(one.tokens)

    kind = dataset.kind if isinstance(dataset, ForeignDataset) else "safetensors"
    seq_len = getattr(dataset, "seq_len", None)
    return TokenSource(kind, m.dtype, dataset.num_tokens, m.documents, int(seq_len or 0) or None, read, facts, dataset)


def open_tokens(path: str | Path, options: Options) -> TokenSource | None:
    """What holds tokens at a path or a pattern; None where it is of another kind."""
    text = str(path)
    if "://" in text and not text.startswith("file://"):
        raise UsageError(
            f"{text}: expected a path on this machine, got a URL. Copy it here first: forebay mirror {text} DIR."
        )
    place = Path(text.removeprefix("file://"))
    if (place / MANIFEST_FILE).is_file():
        dataset = open_dataset(place)
        return tokens_of_dataset(dataset) if dataset.manifest.layout == "tokens" else None
    if (
        not place.exists()
        and not place.with_name(place.name + ".idx").exists()
        and not re.search(r"[*?\[]", place.name)
    ):
        raise DatasetError(f"{place}: expected something to convert, got nothing there. Check the path.")
    found = open_foreign(place, dtype=options.input_dtype, column=options.column)
    return None if found is None else tokens_of_dataset(found)
