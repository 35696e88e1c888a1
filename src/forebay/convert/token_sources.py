"""What holds tokens, as one stream: datasets of Forebay's own and of every format of `formats`, plain SafeTensors.

Hides: which of them it is. A table's list column is `content.tokens_of_table`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forebay.convert.content import Options, TokenPart, TokenSource
from forebay.dataset.manifest import MANIFEST_FILE, TOKEN_DTYPES
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import Slice, locate_tensors, open_slice, release_pages
from forebay.errors import DatasetError, ForebayError, UsageError
from forebay.formats import ForeignDataset, open_foreign
from forebay.formats.foreign import TOKEN_COLUMNS

_INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


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
    """What holds tokens at a path or a pattern; None where it is of another kind.

    Raises:
        DatasetError: If it is damaged, or is not there.
        UsageError: If it cannot be read without `options.input_dtype`, is several datasets, or a URL.
    """
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
    plain = _plain(place, options.column)
    if plain is not None:
        return plain
    found = open_foreign(place, dtype=options.input_dtype, column=options.column)
    return None if found is None else tokens_of_dataset(found)


def _plain(place: Path, column: str | None) -> TokenSource | None:
    """SafeTensors files without a manifest, by name: `tokens` and `document_ends`, or rows of token ids."""
    files = [place] if place.is_file() else sorted(p for p in place.rglob("*.safetensors")) if place.is_dir() else []
    found = [_tokens_in(file, column) for file in files]
    if not found or None in found:
        return None
    names = {(one[0], one[1]) for one in found if one is not None}
    if len(names) != 1:
        raise DatasetError(f"{place}: expected one tensor of tokens in every file, got {sorted(names)}.")
    name, dtype = names.pop()
    tokens = sum(one[2] for one in found if one is not None)
    lengths = {one[4] for one in found if one is not None}
    documents = sum(one[3] for one in found if one is not None)

    def read() -> Iterator[TokenPart]:
        for file in files:
            one = open_slice(file)
            yield _part(one, name, dtype)
            release_pages(one.tensors[name])

    seq_len = lengths.pop() if len(lengths) == 1 else None
    return TokenSource("safetensors files", dtype, tokens, documents, seq_len, read)


def _tokens_in(file: Path, column: str | None) -> tuple[str, str, int, int, int | None] | None:
    """(tensor, dtype, tokens, documents, seq_len) of a SafeTensors file; None if it is none, or holds no tokens."""
    try:
        with file.open("rb") as opened:
            tensors = locate_tensors(opened.read, file.stat().st_size)
    except (OSError, ForebayError):
        if file.suffix == ".safetensors":
            raise
        return None
    for name in [column] if column is not None else TOKEN_COLUMNS:
        kind, shape, *_ = tensors.get(name, ("", ()))
        if kind not in _INTEGERS or len(shape) not in (1, 2):
            continue
        dtype = "U16" if kind in ("U8", "I8", "U16", "I16") else "U32"
        if len(shape) == 2:
            return name, dtype, shape[0] * shape[1], shape[0], shape[1]
        ends = tensors.get("document_ends", ("", (0,)))
        return name, dtype, shape[0], ends[1][0] if ends[0] == "U64" and len(ends[1]) == 1 else 0, None
    return None


def _part(one: Slice, column: str, dtype: str) -> TokenPart:
    array = one.tensors[column]
    if array.ndim == 2:
        ends = np.arange(1, len(array) + 1, dtype=np.uint64) * np.uint64(array.shape[1])
    else:
        ends = one.document_ends if one.dtypes.get("document_ends") == "U64" else np.empty(0, np.uint64)
    tokens, kind = array.reshape(-1), TOKEN_DTYPES[dtype]
    if tokens.dtype == kind:
        return TokenPart(tokens, ends)
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) > np.iinfo(kind).max):
        raise DatasetError(
            f"{one.path}: expected token ids in {column}, got {int(tokens.min())} to {int(tokens.max())}. "
            "Name the tensor of tokens with --column."
        )
    return TokenPart(tokens.astype(kind), ends)
