"""A folder of images as rows: `image`, the file's bytes; `label`, the number of its class; `path`, where it lies.

A directory of directories is a directory of classes, by name; images that lie in no directory have no label. What is
no image by its first bytes is passed over.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.convert.table_sources.base import BATCH_BYTES, Table, batched
from forebay.errors import UsageError

_SPLITS = ("train", "val", "valid", "validation", "test")


def open_pictures(folder: Path, files: Sequence[Path]) -> Table:
    """The images among `files`, all below `folder`.

    Raises:
        UsageError: If the folder holds splits, each of which is a dataset; or images beside classes.
    """
    owners = [path.relative_to(folder).parts[:-1] for path in files]
    tops = sorted({parts[0] for parts in owners if parts})
    if tops and any(len(parts) > 1 for parts in owners) and all(top.lower() in _SPLITS for top in tops):
        raise UsageError(f"{folder}: expected images or classes, got splits {', '.join(tops)}. Convert each by itself.")
    if tops and not all(owners):
        stray = next(path for path, parts in zip(files, owners) if not parts)
        raise UsageError(f"{folder}: expected every image in the directory of its class, got {stray.name} beside them.")
    columns = [("image", pa.binary()), *([("label", pa.int64())] if tops else []), ("path", pa.string())]
    schema = pa.schema(columns)
    labels = {top: number for number, top in enumerate(tops)}

    def read() -> Iterator[pa.RecordBatch]:
        rows: Iterator[dict[str, Any]] = (
            {
                "image": path.read_bytes(),
                **({"label": labels[parts[0]]} if tops else {}),
                "path": path.relative_to(folder).as_posix(),
            }
            for path, parts in zip(files, owners)
        )
        some = batched(rows, lambda row: len(row["image"]), BATCH_BYTES, len(files))
        return map(functools.partial(pa.RecordBatch.from_pylist, schema=schema), some)

    return Table("images", schema, len(files), read, {"classes": tops} if tops else {})
