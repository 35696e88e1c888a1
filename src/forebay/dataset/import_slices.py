"""Make a dataset of existing SafeTensors files: the files stay unchanged, a manifest is added; or upgrade a dataset.

Layout `tokens` if every file has a U16 or U32 vector `tokens` and a U64 vector `document_ends`; otherwise `rows`: every
file must hold the same tensors (type and shape, apart from the first dimension and the second of 2-D integers).
Costs one reading of all bytes, for their hashes; writes three small files. A dataset of format 1 gets the manifest,
table and hashes of chunks of the current format; its slices are verified and stay as they are.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.dataset.chunks import CHUNKS_FILE, chunk_size, hash_slice
from forebay.dataset.manifest import FORMAT_VERSION, MANIFEST_FILE, TABLE_FILE, Manifest, SliceInfo, SliceTable
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import Slice, check_document_ends, open_slice
from forebay.errors import DatasetError, UsageError
from forebay.files import atomic_write, commit_files, remove_stale

_NEXT_MANIFEST = f".{MANIFEST_FILE}.next"


def import_slices(directory: str | Path, name: str | None = None) -> Dataset:
    """Write `manifest.json` and `slices.parquet` for the `*.safetensors` files of a directory, at any depth.

    Slices are in the order of their names. A dataset that is there is verified and stays as it is; one of an earlier
    format is upgraded.

    Args:
        name: Of the dataset; by default that of the dataset that is there, or the directory's.

    Raises:
        DatasetError: If there are no such files, they differ in their tensors, or those of a dataset are damaged.
        UsageError: If another dataset's manifest exists there.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise DatasetError(f"import: expected a directory of .safetensors files, got {folder}. Check the path.")
    remove_stale(folder)
    _finish_upgrade(folder)
    if (folder / MANIFEST_FILE).exists():
        dataset = open_dataset(folder)
        if dataset.manifest.format < FORMAT_VERSION:
            return _upgrade(dataset, name)
        if name in (None, dataset.name) and dataset.verify().ok:
            return dataset
        raise UsageError(
            f"import: expected no other dataset in {folder}, got {dataset.name!r} ({dataset.id[:12]}…). "
            f"Remove {MANIFEST_FILE} and {TABLE_FILE} to import the files again."
        )
    paths = sorted((p.relative_to(folder).as_posix(), p) for p in folder.rglob("*.safetensors") if p.is_file())
    if not paths:
        raise DatasetError(f"import: expected .safetensors files in {folder}, got none.")
    first = open_slice(paths[0][1])
    layout, shared = first.layout, _signature(first)
    rows: list[SliceInfo] = []
    for index, (relative, path) in enumerate(paths):
        opened = open_slice(path)
        joined = _join(shared, _signature(opened)) if opened.layout == layout else None
        if joined is None:
            raise DatasetError(
                f"import: expected {relative} to hold {shared} as {paths[0][0]} does, got {_signature(opened)}. "
                "Import them as two datasets."
            )
        shared = joined
        rows.append(_row(index, relative, opened, layout))
    chunk_bytes = chunk_size(max(row.bytes for row in rows))
    rows, leaves = _hash_all(folder, rows, chunk_bytes)
    table = SliceTable.from_rows(rows, chunk_bytes)
    dtype = first.dtypes["tokens"] if layout == "tokens" else ""
    lineage = {"imported": {"tensors": shared}}
    manifest = Manifest.of(table, lineage, name=name or folder.resolve().name, layout=layout, dtype=dtype)
    atomic_write(folder / CHUNKS_FILE, leaves)
    atomic_write(folder / TABLE_FILE, table.to_parquet())
    atomic_write(folder / MANIFEST_FILE, manifest.to_json())
    return open_dataset(folder)


def _upgrade(dataset: Dataset, name: str | None) -> Dataset:
    report = dataset.verify()
    if report.changed or report.missing:
        raise DatasetError(
            f"import: expected the dataset's files in {dataset.path}, got others: {', '.join(report.bad[:5])}. Fetch "
            "or prepare them again, then import."
        )
    table, folder = dataset.table, dataset.path
    chunk_bytes = chunk_size(int(table.bytes.max(initial=0)))
    rows, leaves = _hash_all(folder, [table.row(index) for index in range(len(table))], chunk_bytes)
    table = SliceTable.from_rows(rows, chunk_bytes)
    data = table.to_parquet()
    manifest = replace(
        dataset.manifest, format=FORMAT_VERSION, name=name or dataset.name, chunk_bytes=chunk_bytes,
        table_sha256=hashlib.sha256(data).hexdigest(),
    )  # fmt: skip
    atomic_write(folder / CHUNKS_FILE, leaves)
    # After a kill between these, importing again finishes the upgrade.
    atomic_write(folder / _NEXT_MANIFEST, manifest.to_json())
    atomic_write(folder / TABLE_FILE, data)
    commit_files({folder / _NEXT_MANIFEST: folder / MANIFEST_FILE})
    return open_dataset(folder)


def _finish_upgrade(folder: Path) -> None:
    """Rename the manifest of an upgrade that a kill broke off after its table was written; else remove it."""
    path = folder / _NEXT_MANIFEST
    if path.exists():
        expected = Manifest.from_json(path.read_bytes()).table_sha256
        if hashlib.sha256((folder / TABLE_FILE).read_bytes()).hexdigest() == expected:
            commit_files({path: folder / MANIFEST_FILE})
        else:
            path.unlink()


def _hash_all(folder: Path, rows: Sequence[SliceInfo], chunk_bytes: int) -> tuple[list[SliceInfo], list[bytes]]:
    """The rows with their ids, and the leaves of each."""
    hashed, leaves = [], []
    for row in rows:
        sha256, of_slice = hash_slice(folder / row.name, chunk_bytes)
        hashed.append(replace(row, sha256=sha256))
        leaves.append(of_slice)
    return hashed, leaves


def _row(index: int, relative: str, opened: Slice, layout: str) -> SliceInfo:
    count, documents = opened.num_rows if layout == "rows" else len(opened.tokens), 0
    if layout == "tokens":
        if problem := check_document_ends(opened.document_ends, count):
            raise DatasetError(f"import: document_ends of {relative}: {problem}.")
        documents = len(opened.document_ends)
    return SliceInfo(index, relative, opened.path.stat().st_size, "", count, documents)


def _signature(opened: Slice) -> dict[str, Any]:
    if opened.layout == "tokens":
        kinds = {name: opened.dtypes[name] for name in ("document_ends", "tokens")}
        return {name: [kind, *opened.tensors[name].shape[1:]] for name, kind in kinds.items()}
    return {name: [opened.dtypes[name], *opened.tensors[name].shape[1:]] for name in sorted(opened.tensors)}


def _join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any] | None:
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
