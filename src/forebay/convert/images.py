"""A folder of images as a table, and encoded images in a table as arrays: `images` U8 [N, C, H, W] beside `labels`.

Hides: the decoder (Pillow, extra `vision`; in threads, for it lets go of the interpreter's lock), and that photographs
are turned as their EXIF says. One channel if the first image is grey, else three (an alpha channel is dropped). What
cannot be decoded is kept aside with its reason, and counted; an image of another size is refused, unless told to be
resized or cropped. Cost: some 2 ms for a photograph of 500 x 375 a core.
"""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.convert.content import Options, TableSource
from forebay.convert.table import BATCH_BYTES, column_of, field_of, rows_at_once
from forebay.convert.values import is_bytes
from forebay.errors import DatasetError, MissingPackageError, UsageError, install_command
from forebay.formats.detect import is_image
from forebay.prepare.documents import batched

_SPLITS = ("train", "val", "valid", "validation", "test")
_NAMES = {"image": "images", "label": "labels"}
_MOST_PIXELS = 100_000_000  # A larger image is kept aside: it may be a few bytes that unpack to all memory.


@dataclass(frozen=True)
class Aside:
    """A row that is not in the result: its number, what it is called, why."""

    row: int
    name: str
    reason: str


def open_pictures(folder: Path, files: Sequence[Path]) -> TableSource:
    """Images below `folder` as rows: `image`, the file's bytes; `label`, the number of its class; `path`, its place.

    A directory of directories is a directory of classes, by name; images that lie in no directory have no label.
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

    return TableSource("images", schema, len(files), read, {"classes": tops} if tops else {})


def with_images(source: TableSource, options: Options, aside: list[Aside]) -> TableSource:
    """The table with its encoded images as arrays; as it is if it has none.

    Columns `image` and `label` become `images` and `labels`. How many rows there are is known once all are decoded.
    `aside` becomes what the last reading left out; whole when it is over.
    """
    source = bare_images(source)
    column = image_column(source)
    if column is None:
        return source
    tried = (decode(blob, None, options) for batch in source.batches() for blob in batch.column(column).to_pylist())
    reason = ""
    for image in tried:
        if not isinstance(image, str):
            break
        reason = reason or image
    else:
        raise DatasetError(f"column {column!r}: expected images, got none that can be decoded: {reason}.")
    shape = image.shape
    schema = pa.schema(
        [
            field_of("images", np.dtype(np.uint8), shape)
            if one.name == column
            else pa.field(_NAMES.get(one.name, one.name), one.type)
            for one in source.schema
        ]
    )

    def decoded(pool: ThreadPoolExecutor, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        """A batch with images in place of the column; those that are none go `aside`."""
        found = list(pool.map(lambda blob: decode(blob, shape[0], options), batch.column(column).to_pylist()))
        names = batch.column("path").to_pylist() if "path" in batch.schema.names else [None] * len(found)
        kept = []
        for i, image in enumerate(found):
            name = names[i] or f"row {first + i}"
            if isinstance(image, str):
                aside.append(Aside(first + i, name, image))
            elif image.shape != shape:
                raise DatasetError(
                    f"{name}: expected an image of {shape[1]} x {shape[2]} (height x width) as the first, got "
                    f"{image.shape[1]} x {image.shape[2]}. Make them alike with --resize HxW or --crop HxW."
                )
            else:
                kept.append(i)
        rest = batch.take(pa.array(kept, pa.int64()))
        stacked = np.stack([found[i] for i in kept]) if kept else np.empty((0, *shape), np.uint8)
        columns = [
            column_of(stacked, one) if old == column else rest.column(old)
            for one, old in zip(schema, batch.schema.names)
        ]
        return pa.record_batch(columns, schema=schema)

    def read() -> Iterator[pa.RecordBatch]:
        aside.clear()
        step = rows_at_once(float(np.prod(shape)))
        first = 0
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for batch in source.batches():
                for start in range(0, batch.num_rows, step):
                    yield decoded(pool, batch.slice(start, step), first + start)
                first += batch.num_rows

    return replace(source, schema=schema, num_rows=None, batches=read)


def image_column(source: TableSource) -> str | None:
    """The first column of bytes whose first value begins as an image does."""
    blobs: list[str] = [one.name for one in source.schema if is_bytes(one.type)]
    if not blobs:
        return None
    for batch in source.batches():
        for name in blobs:
            first = next((value for value in batch.column(name).to_pylist() if value), b"")
            if is_image(first[:64]):
                return name
        if batch.num_rows:
            break
    return "image" if "image" in blobs else None


def bare_images(source: TableSource) -> TableSource:
    """Columns of {bytes, path}, as Hugging Face stores images, as their bytes alone."""
    wrapped = [field.name for field in source.schema if _is_wrapped(field.type)]
    if not wrapped:
        return source
    fields = [pa.field(f.name, pa.binary()) if f.name in wrapped else f for f in source.schema]
    return source.changed(
        pa.schema(fields),
        lambda batch: [
            pa.compute.struct_field(column, "bytes").cast(pa.binary()) if name in wrapped else column
            for name, column in zip(batch.schema.names, batch.columns)
        ],
    )


def _is_wrapped(kind: Any) -> bool:
    if not pa.types.is_struct(kind) or {kind.field(i).name for i in range(kind.num_fields)} != {"bytes", "path"}:
        return False
    return is_bytes(kind.field("bytes").type)


def decode(blob: bytes | None, channels: int | None, options: Options) -> NDArray[np.uint8] | str:
    """U8 [C, H, W], or why there is none; `channels` 1 or 3, None for 1 if the image is grey, else 3."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingPackageError(
            f"Images need the package pillow. Install it with: {install_command('vision')}"
        ) from error
    if not blob:
        return "no bytes"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(blob)) as image:
                if image.width * image.height > _MOST_PIXELS:
                    return f"{image.width} x {image.height} pixels, more than {_MOST_PIXELS}"
                grey = image.mode in ("1", "L", "LA", "I", "I;16", "F")
                if image.mode in ("I", "I;16", "F"):
                    return f"pixels of mode {image.mode}, which 8 bits do not hold"
                if channels == 1 and not grey:
                    return f"mode {image.mode} among images of one channel"
                turned = ImageOps.exif_transpose(image).convert("L" if grey and channels != 3 else "RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        return f"{type(error).__name__}: {error}"
    if options.resize is not None:
        height, width = options.resize
        turned = turned.resize((width, height), Image.Resampling.BICUBIC)
    if options.crop is not None:
        height, width = options.crop
        if turned.width < width or turned.height < height:
            return f"{turned.height} x {turned.width} pixels, less than the crop of {height} x {width}"
        left, top = (turned.width - width) // 2, (turned.height - height) // 2
        turned = turned.crop((left, top, left + width, top + height))
    pixels = np.asarray(turned, np.uint8)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
