"""Datasets in formats of others, opened in place: nothing is converted and nothing is written.

Hides which format it is: `formats.detect` says it of each file, by content first. Names pair what belongs together (an
index and its data, tokens and their sample ids), and suffixes stand for headerless tokens (.bin, .ds), whose content
says nothing.
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.errors import DatasetError, UsageError
from forebay.formats import arrow, litdata, mds, megatron, npy
from forebay.formats.blocks import INDEX_FILE
from forebay.formats.detect import RAW_SUFFIXES, detect
from forebay.formats.foreign import ForeignDataset, reading

__all__ = ["ForeignDataset", "open_foreign"]

_MOST_SNIFFED = 1000  # Files of a directory that are looked into before it is called unknown.
_IDS = "sample_ids"


def open_foreign(path: str | Path, *, dtype: Any = None, column: str | None = None) -> ForeignDataset | None:
    """Open what another tool wrote: Megatron, MDS, LitData, .npy, headerless or llm.c .bin, saved Hugging Face data.

    Args:
        path: A directory, one file, a pattern (`data/train_*.npy`), or the name that Megatron's two files share.
        dtype: Type of tokens that no header tells, such as `uint16`; unused where one does.
        column: Of tokens, for formats with columns; by default `tokens` or `input_ids`.

    Returns:
        None if nothing there is of a format known here; also for a dataset of Forebay's own.

    Raises:
        DatasetError: If it is of a known format and is damaged, truncated or holds no tokens.
        UsageError: If it cannot be read without `dtype`, or is several datasets: the message says how to name one.
    """
    path = Path(path)
    if re.search(r"[*?\[]", path.name) and not path.exists():
        return _open_files(path.parent, sorted(p for p in path.parent.glob(path.name) if p.is_file()), dtype)
    pair = None if path.is_dir() else megatron.pair_of(path)
    if pair is not None:
        return megatron.MegatronDataset(path.parent, [pair])
    if path.is_file():
        if path.name in (INDEX_FILE, arrow.STATE_FILE):
            return open_foreign(path.parent, dtype=dtype, column=column)
        return _open_file(path, dtype)
    if not path.is_dir() or (path / MANIFEST_FILE).is_file():
        return None
    if mds.is_index(path):
        return mds.MdsDataset(path, dtype, column)
    if litdata.is_index(path):
        return litdata.LitDataset(path, column)
    if arrow.is_saved(path):
        return arrow.ArrowDataset(path, column)
    return _open_directory(path, dtype)


def _open_directory(path: Path, dtype: Any) -> ForeignDataset | None:
    files = list(_files(path))
    pairs = [pair for file in files if megatron.is_index(file) and (pair := megatron.pair_of(file))]
    if pairs:
        return megatron.MegatronDataset(path, pairs)
    return _open_files(path, [file for file in files if file.parent == path], dtype)


def _open_files(folder: Path, files: list[Path], dtype: Any) -> ForeignDataset | None:
    """Files of tokens without an index, each of which begins as such, or of the type said, or has sample ids."""
    tokens = [file for file in files if not file.name.startswith(_IDS)]
    found = [file for file in tokens if npy.has_header(file) or npy.ids_of(file) is not None]
    if dtype is not None:
        found = [file for file in tokens if file in set(found) or file.suffix in RAW_SUFFIXES]
    if not found:
        return None
    sets = {re.sub(r"[\d_.-]*$", "", file.stem): file.suffix for file in found}
    if len(sets) > 1:
        raise UsageError(
            f"{folder}: expected one set of token files, got "
            f"{', '.join(f'{n}*{s}' for n, s in list(sets.items())[:8])}. "
            "Give one such pattern in place of the directory."
        )
    return npy.VectorDataset(folder, found, dtype)


def _open_file(path: Path, dtype: Any) -> ForeignDataset | None:
    """One file: tokens if it begins so, their type is said, sample ids stand beside it, or it is called so."""
    found = detect(path)
    if found.problem:
        raise DatasetError(f"{path}: {found.problem}")
    known = dtype is not None or found.format in npy.HEADERS or path.suffix in RAW_SUFFIXES
    if not known and (path.name.startswith(_IDS) or npy.ids_of(path) is None):
        return None
    return npy.VectorDataset(path, [path], dtype)


def _files(path: Path) -> Iterator[Path]:
    """Files below a directory by name, hidden ones left out; none if the first thousand begin as nothing known."""
    with reading(path):
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    known = (file.suffix in RAW_SUFFIXES or megatron.is_index(file) or npy.has_header(file) for file in files)
    return iter(files if any(islice(known, _MOST_SNIFFED)) else ())
