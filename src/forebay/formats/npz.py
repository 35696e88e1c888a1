"""NumPy's archives of arrays, .npz: each array a column. Read as a stream: no array is in memory as a whole."""

import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forebay.errors import DatasetError, UsageError
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TableSource
from forebay.formats.npy import choose_arrays, open_array, table_of_arrays
from forebay.storage.compression import check_unpacked


class Npz(Format):
    """One archive; `column` chooses some of its arrays."""

    name = "npz"
    suffixes = (".npz",)

    def sniff(self, head: bytes) -> bool:
        """A ZIP archive whose first member is named .npy."""
        is_zip = head.startswith(b"PK\x03\x04")
        return is_zip and head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy")

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        path, *others = paths
        if others:
            raise UsageError(f"{path.parent}: expected one .npz, got {len(paths)}. Name one of them.")
        try:
            with zipfile.ZipFile(path) as archive:
                members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        except (zipfile.BadZipFile, OSError) as error:
            raise DatasetError(f"{path}: expected a .npz archive, got: {error}. Fetch it again.") from error
        arrays = []
        for member in members:
            check_unpacked(f"{path}, {member.filename}", member.compress_size, member.file_size)
            name = member.filename.removesuffix(".npy")
            arrays.append(open_array(path, name, partial(_open_member, path, member.filename), member.file_size))
        return table_of_arrays(self.name, choose_arrays(arrays, options.column))


def _open_member(path: Path, name: str) -> Any:
    with zipfile.ZipFile(path) as archive:
        return archive.open(name)  # Keeps the file open until it is closed itself.
