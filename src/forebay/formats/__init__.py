"""File formats, one module each: what a file is, and how its text, tokens or rows are read, written and checked.

`base` lists them, `detect` says which one a file is of, `open_external` opens the tokens of other tools in place.
`base.Format` is what a format can do; nothing else in Forebay parses a file format.
"""

import glob
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.errors import DatasetError, UsageError
from forebay.files import nothing_there, path_below
from forebay.formats.arrow import STATE_FILE, check_split
from forebay.formats.base import formats, get_format
from forebay.formats.blocks import INDEX_FILE
from forebay.formats.detect import RAW_TOKENS, detect
from forebay.formats.external import ExternalDataset, reading
from forebay.formats.megatron import MegatronDataset, is_index, pair_of
from forebay.formats.vectors import (
    GUESSED,
    HEADERS,
    IDS_PREFIX,
    RAW_SUFFIXES,
    VectorDataset,
    check_no_chunks,
    ids_of,
)

__all__ = ["GUESSED", "ExternalDataset", "dataset_format", "open_external", "open_token_files"]

_MAX_SNIFFED = 1000  # Files of a directory that are examined before it counts as unknown.


def dataset_format(folder: Path) -> str:
    """Return the name of the format that a directory as a whole is of; "" if it is of none."""
    return next((entry.name for entry in formats() if entry.is_dataset(folder)), "")


def open_external(path: str | Path, *, dtype: Any = None, column: str | None = None) -> ExternalDataset | None:
    """Open what another tool wrote: Megatron, MDS, .npy, headerless or llm.c .bin, saved Hugging Face data.

    Args:
        path: A directory, one file, a pattern (`data/train_*.npy`), or the name that Megatron's two files share.
        dtype: Type of tokens that no header tells, such as `uint16`; unused where one does. `guessed`: what their
            first bytes tell, with a warning.
        column: Of tokens, for formats with columns; by default `input_ids` or `tokens`.

    Returns:
        None if nothing at the path is of a known format; also for a dataset of Forebay's own.

    Raises:
        DatasetError: If nothing is there, or it is of a known format and is damaged, truncated or holds no tokens.
        UsageError: If it cannot be read without `dtype`, is several datasets (the message tells how to name one), or
            has columns beside the tokens that would be lost, as `formats.layout` says, and `column` names none.
    """
    path = Path(path)
    if not path.exists() and (files := [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]):  # noqa: PTH207
        return open_token_files(path.parent, sorted(files), dtype)
    if path.is_dir():
        return _open_directory(path, dtype, column)
    check_no_chunks(path.parent)
    if pair := pair_of(path):
        return MegatronDataset(path.parent, [pair])
    if not path.exists():
        raise DatasetError(f"{path}: expected a dataset or files of tokens, got {nothing_there(path)}")
    if not path.is_file():
        return None
    if path.name in (INDEX_FILE, STATE_FILE):
        return open_external(path.parent, dtype=dtype, column=column)
    detection = detect(path)
    if detection.problem:
        raise DatasetError(f"{path}: {detection.problem}")
    is_tokens = dtype not in (None, GUESSED) or detection.format in (*HEADERS, RAW_TOKENS)
    if not is_tokens and (path.name.startswith(IDS_PREFIX) or ids_of(path) is None):
        return None
    return VectorDataset(path, [path], dtype)


def _open_directory(path: Path, dtype: Any, column: str | None) -> ExternalDataset | None:
    if (path / MANIFEST_FILE).is_file():
        return None
    check_split(path)
    if name := dataset_format(path):
        return get_format(name).open_tokens(path, dtype, column)
    files = list(_files(path))
    pairs = [pair for file in files if is_index(file) and (pair := pair_of(file))]
    beside = [file for file in files if file.parent == path]
    opened = MegatronDataset(path, pairs) if pairs else open_token_files(path, beside, dtype)
    for file in opened.files if opened is not None else ():
        path_below(path, file.relative_to(path).as_posix())
    return opened


def open_token_files(folder: Path, files: Sequence[Path], dtype: Any) -> ExternalDataset | None:
    """Open those of the files of a folder that hold a vector of tokens each; None if none does. Errors as above."""
    tokens = [file for file in files if not file.name.startswith(IDS_PREFIX)]
    chosen = [file for file in tokens if detect(file).format in HEADERS or ids_of(file) is not None]
    if dtype is GUESSED:
        chosen += [file for file in tokens if file not in chosen and detect(file).format == RAW_TOKENS]
    elif dtype is not None:
        chosen = [file for file in tokens if file in set(chosen) or file.suffix in RAW_SUFFIXES]
    if not chosen:
        return None
    sets = {re.sub(r"[\d_.-]*$", "", file.stem): file.suffix for file in chosen}
    if len(sets) > 1:
        stem = max(sets, key=len)  # No other name begins with it.
        raise UsageError(
            f"{folder}: expected one set of token files, got "
            f"{', '.join(f'{n}*{s}' for n, s in list(sets.items())[:8])}. "
            f"Name one of them by its pattern, such as {folder / stem}*{sets[stem]}."
        )
    return VectorDataset(folder, sorted(chosen), dtype)


def _files(path: Path) -> Iterator[Path]:
    with reading(path):
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    are_tokens = (file.suffix in RAW_SUFFIXES or is_index(file) or detect(file).format in HEADERS for file in files)
    return iter(files if any(islice(are_tokens, _MAX_SNIFFED)) else ())
