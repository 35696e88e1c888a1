"""Make a dataset of existing SafeTensors files: the files stay unchanged, a manifest is added.

Layout `tokens` if every file has a U16 or U32 vector `tokens` and a U64 vector `document_ends`; otherwise `rows`: every
file must hold the same tensors (type and shape, apart from the first dimension and the second of 2-D integers).
Costs one reading of all bytes, for their hashes; writes four small files.
"""

from dataclasses import replace
from pathlib import Path

from forebay.base import Json
from forebay.dataset.chunks import CHUNKS_FILE, HashedPieces, chunk_size, hash_slice
from forebay.dataset.lengths import encode_lengths
from forebay.dataset.manifest import LENGTHS_FILE, MANIFEST_FILE, TABLE_FILE, Manifest, SliceInfo, SliceTable
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import Slice, check_document_ends, open_slice
from forebay.errors import DatasetError, UsageError
from forebay.files import atomic_write, path_below, remove_stale


def import_slices(directory: str | Path, name: str | None = None) -> Dataset:
    """Write `manifest.json` and `slices.parquet` for the `*.safetensors` files of a directory, at any depth.

    Slices are in the order of their names. A dataset that is there is verified and stays as it is.

    Args:
        name: Of the dataset; by default that of the dataset that is there, or the directory's.

    Raises:
        DatasetError: If there are no such files, they differ in their tensors, or those of a dataset are damaged.
        UsageError: If another dataset's manifest exists there.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise DatasetError(
            f"import: {folder}: expected a directory of .safetensors files, got "
            f"{'a file' if folder.is_file() else 'nothing there'}. Check the path."
        )
    remove_stale(folder)
    if (folder / MANIFEST_FILE).exists():
        dataset = open_dataset(folder)
        if name in (None, dataset.name) and dataset.verify().ok:
            return dataset
        raise UsageError(
            f"import: expected no other dataset in {folder}, got {dataset.name!r} ({dataset.id[:12]}…). "
            f"Remove {MANIFEST_FILE} and {TABLE_FILE} to import the files again."
        )
    paths = sorted((p.relative_to(folder).as_posix(), p) for p in folder.rglob("*.safetensors") if p.is_file())
    if not paths:
        raise DatasetError(f"import: expected .safetensors files in {folder}, got none.")
    first = open_slice(path_below(folder, paths[0][0]))
    layout, shared = first.layout, _signature(first)
    rows, frames = list[SliceInfo](), list[bytes]()
    for index, (relative, path) in enumerate(paths):
        opened = open_slice(path_below(folder, relative))
        joined = _join(shared, _signature(opened)) if opened.layout == layout else None
        if joined is None:
            raise DatasetError(
                f"import: expected {relative} to hold {shared} as {paths[0][0]} does, got {_signature(opened)}. "
                "Import them as two datasets."
            )
        shared = joined
        count, documents = (opened.num_rows, 0) if layout == "rows" else (len(opened.tokens), len(opened.document_ends))
        if layout == "tokens":
            if problem := check_document_ends(opened.document_ends, count):
                raise DatasetError(f"import: document_ends of {relative}: {problem}.")
            frames.append(encode_lengths(opened.document_ends, count))
        rows.append(SliceInfo(index, relative, path.stat().st_size, "", count, documents))
    chunk_bytes = chunk_size(max(row.bytes for row in rows))
    hashes = [hash_slice(path, chunk_bytes) for _, path in paths]
    table = SliceTable.from_rows([replace(row, sha256=id) for row, (id, _) in zip(rows, hashes)], chunk_bytes)
    dtype = first.dtypes["tokens"] if layout == "tokens" else ""
    lineage = {"imported": {"tensors": shared}}
    lengths = HashedPieces(frames) if layout == "tokens" else None
    if lengths:
        atomic_write(folder / LENGTHS_FILE, lengths)
    manifest = Manifest.of(
        table, lineage, name=name or folder.resolve().name, layout=layout, dtype=dtype, lengths=lengths
    )
    atomic_write(folder / CHUNKS_FILE, (leaves for _, leaves in hashes))
    atomic_write(folder / TABLE_FILE, table.to_parquet())
    atomic_write(folder / MANIFEST_FILE, manifest.to_json())
    return open_dataset(folder)


def _signature(opened: Slice) -> Json:
    if opened.layout == "tokens":
        kinds = {name: opened.dtypes[name] for name in ("document_ends", "tokens")}
        return {name: [kind, *opened.tensors[name].shape[1:]] for name, kind in kinds.items()}
    return {name: [opened.dtypes[name], *opened.tensors[name].shape[1:]] for name in sorted(opened.tensors)}


def _join(first: Json, second: Json) -> Json | None:
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
