"""Make a dataset of SafeTensors files that somebody else wrote: they stay as they are and get a manifest.

Hides: how a layout is recognised. `tokens` where every file has a U16 or U32 vector `tokens` and a U64 vector
`document_ends`; otherwise `rows`, where every file holds the same tensors (type and shape but for the first
dimension, and the second of two of integers: rows of other lengths, which a loader pads).
Costs one reading of all bytes, for their hashes; writes two small files.
"""

from pathlib import Path
from typing import Any

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, Manifest, SliceInfo, SliceTable
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import Slice, check_document_ends, hash_file, open_slice
from forebay.errors import DatasetError, UsageError
from forebay.files import atomic_write, remove_stale


def adopt(directory: str | Path, name: str | None = None) -> Dataset:
    """Give the `*.safetensors` files of a directory, at any depth, a manifest; slice order is by name.

    `manifest.json` and `slices.parquet` are written there; the name of the dataset is by default the directory's.
    Adopting again the same files under the same name changes nothing.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise DatasetError(f"adopt: expected a directory of .safetensors files, got {folder}, which is none.")
    remove_stale(folder)
    paths = sorted((p.relative_to(folder).as_posix(), p) for p in folder.rglob("*.safetensors") if p.is_file())
    if not paths:
        raise DatasetError(f"adopt: expected .safetensors files in {folder}, got none.")
    first = open_slice(paths[0][1])
    layout, shared = first.layout, _signature(first)
    rows: list[SliceInfo] = []
    for index, (relative, path) in enumerate(paths):
        one = open_slice(path)
        joined = _join(shared, _signature(one)) if one.layout == layout else None
        if joined is None:
            raise DatasetError(
                f"adopt: expected {relative} to hold {shared} as {paths[0][0]} does, got {_signature(one)}. "
                "Adopt them as two datasets."
            )
        shared = joined
        rows.append(_row(index, relative, one, layout))
    table = SliceTable.from_rows(rows)
    dtype = first.dtypes["tokens"] if layout == "tokens" else ""
    lineage = {"adopted": {"tensors": shared}}
    manifest = Manifest.of(table, lineage, name=name or folder.resolve().name, layout=layout, dtype=dtype)
    _commit(folder, manifest.to_json(), table.to_parquet())
    return open_dataset(folder)


def _row(index: int, relative: str, one: Slice, layout: str) -> SliceInfo:
    documents = 0
    if layout == "tokens":
        problem = check_document_ends(one.document_ends, len(one.tokens))
        if problem:
            raise DatasetError(f"adopt: document_ends of {relative}: {problem}.")
        count, documents = len(one.tokens), len(one.document_ends)
    else:
        count = one.num_rows
    return SliceInfo(index, relative, one.path.stat().st_size, hash_file(one.path), count, documents)


def _commit(folder: Path, manifest: bytes, table: bytes) -> None:
    target = folder / MANIFEST_FILE
    if target.exists():
        if target.read_bytes() == manifest:
            return
        raise UsageError(
            f"adopt: expected no other dataset in {folder}, got its {MANIFEST_FILE}. "
            f"Remove {MANIFEST_FILE} and {TABLE_FILE} to adopt the files anew."
        )
    atomic_write(folder / TABLE_FILE, table)
    atomic_write(target, manifest)


def _signature(one: Slice) -> dict[str, Any]:
    if one.layout == "tokens":
        kinds = {name: one.dtypes[name] for name in ("document_ends", "tokens")}
        return {name: [kind, *one.tensors[name].shape[1:]] for name, kind in kinds.items()}
    return {name: [one.dtypes[name], *one.tensors[name].shape[1:]] for name in sorted(one.tensors)}


def _join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any] | None:
    """What two files' tensors have in common, -1 where the lengths of rows differ; None if more than that does."""
    if first == second:
        return first
    if first.keys() != second.keys():
        return None
    joined = {}
    for name, (kind, *shape) in first.items():
        other_kind, *other_shape = second[name]
        padded = len(shape) == len(other_shape) == 1 and kind[0] in "UI"  # Ids and masks; numbers are never padded.
        if kind != other_kind or (shape != other_shape and not padded):
            return None
        joined[name] = [kind, *(shape if shape == other_shape else [-1])]
    return joined
