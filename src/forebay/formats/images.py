"""Directories of images as tables, and encoded images in tables as arrays: `images` U8 [N, C, H, W] beside `labels`.

Hides the decoder (Pillow, extra `vision`; in threads, as it releases the interpreter's lock), and that photographs
are turned as their EXIF says. One channel if the first image is grey, else three (an alpha channel is dropped). One
that cannot be decoded is rejected with its reason, and counted; one of another size is an error, unless `resize`
is set. Cost: some 2 ms for a photograph of 500 x 375 a core.
"""

import functools
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.arrays import U8
from forebay.base import Json
from forebay.errors import DatasetError, UsageError, package_for
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TableSource
from forebay.formats.records import batched
from forebay.formats.tables import BATCH_BYTES, arrow_field, column_of, is_bytes, rows_at_once
from forebay.machine import num_cores

_SPLITS = ("train", "val", "valid", "validation", "test")
_NAMES = {"image": "images", "label": "labels"}
_MAX_PIXELS = 100_000_000  # A larger image is rejected: it may be a few bytes that unpack to all memory.
_MAGICS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
_BMP = re.compile(rb"BM.{4}\0{4}", re.DOTALL)
_NETPBM = re.compile(rb"P[56]\s+(#[^\n]*\s+)*\d+\s+\d+\s+\d+\s")


class Images(Format):
    """Files of images below a directory, as rows: `image`, the file's bytes; `label`, the number of its class; `path`.

    A directory of directories is a directory of classes, by name; images beside no directory have no label.
    """

    name = "images"
    suffixes = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")

    def sniff(self, head: bytes) -> bool:
        return is_image(head)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions, folder: Path | None = None) -> TableSource:
        """As of any format; `folder` is the directory of the classes, by default that of the first file."""
        folder = folder or paths[0].parent
        owners = [path.relative_to(folder).parts[:-1] for path in paths]
        classes = sorted({parts[0] for parts in owners if parts})
        if classes and any(len(parts) > 1 for parts in owners) and all(name.lower() in _SPLITS for name in classes):
            raise UsageError(
                f"{folder}: expected images or classes, got splits {', '.join(classes)}. Convert each by itself."
            )
        if classes and not all(owners):
            stray = next(path for path, parts in zip(paths, owners) if not parts)
            raise UsageError(
                f"{folder}: expected every image in the directory of its class, got {stray.name} beside them."
            )
        columns = [("image", pa.binary()), *([("label", pa.int64())] if classes else []), ("path", pa.string())]
        schema = pa.schema(columns)
        labels = {name: number for number, name in enumerate(classes)}

        def read() -> Iterator[pa.RecordBatch]:
            rows: Iterator[Json] = (
                {"image": path.read_bytes(), "path": path.relative_to(folder).as_posix()}
                | ({"label": labels[parts[0]]} if classes else {})
                for path, parts in zip(paths, owners)
            )
            batches = batched(rows, lambda row: len(row["image"]), BATCH_BYTES, len(paths))
            return map(functools.partial(pa.RecordBatch.from_pylist, schema=schema), batches)

        return TableSource(self.name, schema, len(paths), read, {"classes": classes} if classes else {})


def is_image(head: bytes) -> bool:
    """Return whether first bytes (64 suffice) are of a PNG, JPEG, GIF, BMP, TIFF, WebP or binary PGM or PPM image."""
    if head.startswith(_MAGICS) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return True
    return _BMP.match(head) is not None or _NETPBM.match(head) is not None


def with_images(source: TableSource, options: ConvertOptions, rejected: list[Json]) -> TableSource:
    """Return the table with its encoded images as arrays; as it is if it has none.

    Columns `image` and `label` become `images` and `labels`. How many rows there are is known once all are decoded.
    `rejected` becomes the row, name and reason of those that the last reading left out; complete at its end.
    """
    source = unwrap_images(source)
    column = image_column(source)
    if column is None:
        return source
    attempts = (decode(blob, None, options) for batch in source.batches() for blob in batch.column(column).to_pylist())
    image: Any = "no rows"
    for image in attempts:
        if not isinstance(image, str):
            break
    else:
        raise DatasetError(f"column {column!r}: expected images, got none that can be decoded: {image}.")
    shape = image.shape
    images_field = arrow_field("images", np.dtype(np.uint8), shape)
    others = [pa.field(_NAMES.get(field.name, field.name), field.type) for field in source.schema]
    schema = pa.schema([images_field if f.name == column else other for f, other in zip(source.schema, others)])

    def decoded(pool: ThreadPoolExecutor, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        """A batch with images in place of the column; those that cannot be decoded are `rejected`."""
        images = list(pool.map(lambda blob: decode(blob, shape[0], options), batch.column(column).to_pylist()))
        names = batch.column("path").to_pylist() if "path" in batch.schema.names else [None] * len(images)
        decoded_rows = []
        for i, image in enumerate(images):
            name = names[i] or f"row {first + i}"
            if isinstance(image, str):
                rejected.append({"row": first + i, "name": name, "reason": image})
            elif image.shape != shape:
                raise DatasetError(
                    f"{name}: expected an image of {shape[1]} x {shape[2]} (height x width) as the first, got "
                    f"{image.shape[1]} x {image.shape[2]}. Make them alike with --set resize=HxW."
                )
            else:
                decoded_rows.append(i)
        rest = batch.take(pa.array(decoded_rows, pa.int64()))
        stacked = np.stack([images[i] for i in decoded_rows]) if decoded_rows else np.empty((0, *shape), np.uint8)
        columns = [
            column_of(stacked, field) if old == column else rest.column(old)
            for field, old in zip(schema, batch.schema.names)
        ]
        return pa.record_batch(columns, schema=schema)

    def read() -> Iterator[pa.RecordBatch]:
        rejected.clear()
        step = rows_at_once(float(np.prod(shape)))
        first = 0
        with ThreadPoolExecutor(min(8, num_cores())) as pool:
            for batch in source.batches():
                for start in range(0, batch.num_rows, step):
                    yield decoded(pool, batch.slice(start, step), first + start)
                first += batch.num_rows

    return replace(source, schema=schema, num_rows=None, batches=read)


def image_column(source: TableSource) -> str | None:
    """Return the first column of bytes whose first value begins as an image does."""
    blobs: list[str] = [field.name for field in source.schema if is_bytes(field.type)]
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


def unwrap_images(source: TableSource) -> TableSource:
    """Return the table with columns of {bytes, path}, as Hugging Face stores images, as their bytes alone."""
    wrapped = [
        field.name
        for field in source.schema
        if pa.types.is_struct(field.type)
        and {part.name for part in field.type.fields} == {"bytes", "path"}
        and is_bytes(field.type.field("bytes").type)
    ]
    if not wrapped:
        return source
    fields = [pa.field(f.name, pa.binary()) if f.name in wrapped else f for f in source.schema]
    return source.with_columns(
        pa.schema(fields),
        lambda batch: [
            pa.compute.struct_field(column, "bytes").cast(pa.binary()) if name in wrapped else column
            for name, column in zip(batch.schema.names, batch.columns)
        ],
    )


def decode(blob: bytes | None, channels: int | None, options: ConvertOptions) -> U8 | str:
    """Return U8 [C, H, W], or the reason why there is none; `channels` 1 or 3, None for 1 if it is grey, else 3."""
    with package_for("An image"):
        from PIL import Image, ImageOps
    if not blob:
        return "no bytes"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(blob)) as image:
                if image.width * image.height > _MAX_PIXELS:
                    return f"{image.width} x {image.height} pixels, more than {_MAX_PIXELS}"
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
    pixels = np.asarray(turned, np.uint8)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
