"""The idx files of MNIST, plain or compressed: images and their labels.

Images of one channel, [N, H, W], become [N, 1, H, W]. Source: Y. LeCun's page on MNIST: two zero bytes, a type, the
number of dimensions, each dimension in 4 bytes, values, all big-endian.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from forebay.errors import DatasetError
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TableSource
from forebay.formats.npy import ArrayFile, table_of_arrays
from forebay.formats.tables import open_unpacked

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NAMES = {1: "labels", 2: "values"}


class Idx(Format):
    """Files that belong together."""

    name = "idx"

    def sniff(self, head: bytes) -> bool:
        return len(head) >= 8 and head[:2] == b"\0\0" and head[2] in _TYPES and 1 <= head[3] <= 8

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        return table_of_arrays(self.name, [self._open(path) for path in paths])

    def _open(self, path: Path) -> ArrayFile:
        with closing(open_unpacked(path)) as file:
            head = file.read(4)
            if not self.sniff(head + b"\0" * 4):
                raise DatasetError(f"{path}: expected an idx file, got one that begins with {head.hex(' ')}.")
            dimensions = [int(n) for n in np.frombuffer(file.read(4 * head[3]), ">u4")]
        if len(dimensions) < head[3]:
            raise DatasetError(
                f"{path}: expected {head[3]} dimensions, got {len(dimensions)}: it is cut. Fetch it again."
            )
        rows, *shape = dimensions
        name = _NAMES.get(len(dimensions), "images")
        shape = [1, *shape] if len(shape) == 2 else shape
        start, dtype = 4 + 4 * head[3], np.dtype(_TYPES[head[2]])
        return ArrayFile(name, path, partial(open_unpacked, path), start, dtype, rows, tuple(shape))
