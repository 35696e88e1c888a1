"""Encoded images in a table as arrays: `images` U8 [N, C, H, W] beside `labels`.

Hides: the decoder (Pillow, extra `vision`; in threads, for it lets go of the interpreter's lock), and that photographs
are turned as their EXIF says. One channel if the first image is grey, else three (an alpha channel is dropped). What
cannot be decoded is kept aside with its reason, and counted; an image of another size is refused, unless told to be
resized or cropped. Cost: some 2 ms for a photograph of 500 x 375 a core.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.convert.content import Options, TableSource
from forebay.convert.table_sources.base import Table, column_of, field_of, rows_at_once
from forebay.errors import DatasetError, MissingPackageError
from forebay.extras import install_command
from forebay.formats.detect import is_image

_NAMES = {"image": "images", "label": "labels"}
_MOST_PIXELS = 100_000_000
"""A larger image is kept aside: it may be a few bytes that unpack to all memory."""


@dataclass(frozen=True)
class Aside:
    """A row that is not in the result: its number, what it is called, why."""

    row: int
    name: str
    reason: str


@dataclass
class ImageTable:
    """A `TableSource` whose encoded images are arrays; columns `image` and `label` become `images` and `labels`.

    Attributes:
        aside: What the last reading left out; whole when it is over.
    """

    source: TableSource
    schema: pa.Schema
    _column: str
    _shape: tuple[int, int, int]
    _options: Options
    aside: list[Aside] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """As the source's."""
        return self.source.kind

    @property
    def num_rows(self) -> int | None:
        """Unknown until all are decoded."""
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """As the source's."""
        return dict(getattr(self.source, "facts", {}))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """As `TableSource.batches`; decodes in threads."""
        self.aside.clear()
        step = rows_at_once(float(np.prod(self._shape)))
        first = 0
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for batch in self.source.batches():
                for start in range(0, batch.num_rows, step):
                    yield self._decoded(batch.slice(start, step), first + start, pool)
                first += batch.num_rows

    def _decoded(self, batch: pa.RecordBatch, first: int, pool: ThreadPoolExecutor) -> pa.RecordBatch:
        blobs = batch.column(self._column).to_pylist()
        names = batch.column("path").to_pylist() if "path" in batch.schema.names else [None] * len(blobs)
        found = list(pool.map(lambda blob: decode(blob, self._shape[0], self._options), blobs))
        kept = []
        for i, image in enumerate(found):
            if isinstance(image, str):
                self.aside.append(Aside(first + i, names[i] or f"row {first + i}", image))
                continue
            if image.shape != self._shape:
                raise DatasetError(
                    f"{names[i] or f'row {first + i}'}: expected an image of {self._shape[1]} x {self._shape[2]} "
                    f"(height x width) as the first, got {image.shape[1]} x {image.shape[2]}. Make them alike with "
                    "--resize HxW or --crop HxW."
                )
            kept.append(i)
        rest = batch.take(pa.array(kept, pa.int64()))
        stacked = np.stack([found[i] for i in kept]) if kept else np.empty((0, *self._shape), np.uint8)
        columns = []
        for one in self.schema:
            old = next(n for n in batch.schema.names if renamed(n, self._column) == one.name)
            columns.append(column_of(stacked, one) if old == self._column else rest.column(old))
        return pa.record_batch(columns, schema=self.schema)


def with_images(source: TableSource, options: Options) -> TableSource:
    """The table with its encoded images as arrays; as it is if it has none.

    Raises:
        MissingPackageError: If Pillow is not installed.
        DatasetError: If no image can be decoded.
    """
    source = bare_images(source)
    column = image_column(source)
    if column is None:
        return source
    channels, reason, size = 0, "", (0, 0)
    for batch in source.batches():
        for blob in batch.column(column).to_pylist():
            image = decode(blob, None, options)
            if not isinstance(image, str):
                channels, size = image.shape[0], (int(image.shape[1]), int(image.shape[2]))
                break
            reason = reason or image
        if channels:
            break
    if not channels:
        raise DatasetError(f"column {column!r}: expected images, got none that can be decoded: {reason}.")
    shape = (channels, *size)
    fields = [
        field_of(renamed(one.name, column), np.dtype(np.uint8), shape)
        if one.name == column
        else pa.field(renamed(one.name, column), one.type)
        for one in source.schema
    ]
    return ImageTable(source, pa.schema(fields), column, shape, options)


def renamed(name: str, column: str) -> str:
    """What a column is called once its images are arrays."""
    return "images" if name == column else _NAMES.get(name, name)


def image_column(source: TableSource) -> str | None:
    """The first column of bytes whose first value begins as an image does."""
    blobs: list[str] = [f.name for f in source.schema if pa.types.is_binary(f.type) or pa.types.is_large_binary(f.type)]
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
    schema = pa.schema(fields)

    def read() -> Iterator[pa.RecordBatch]:
        for batch in source.batches():
            columns = [
                pa.compute.struct_field(column, "bytes").cast(pa.binary()) if name in wrapped else column
                for name, column in zip(batch.schema.names, batch.columns)
            ]
            yield pa.record_batch(columns, schema=schema)

    return Table(source.kind, schema, source.num_rows, read, getattr(source, "facts", {}))


def _is_wrapped(kind: Any) -> bool:
    if not pa.types.is_struct(kind) or {kind.field(i).name for i in range(kind.num_fields)} != {"bytes", "path"}:
        return False
    return bool(pa.types.is_binary(kind.field("bytes").type) or pa.types.is_large_binary(kind.field("bytes").type))


def decode(blob: bytes | None, channels: int | None, options: Options) -> NDArray[np.uint8] | str:
    """U8 [C, H, W]; or why there is none.

    Args:
        channels: 1 or 3; None for 1 if the image is grey, else 3.

    Raises:
        MissingPackageError: If Pillow is not installed.
    """
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
