"""A dataset that Hugging Face `datasets` saved with save_to_disk: a column of token lists in Arrow files.

state.json names the Arrow streams in order. Rows are documents. The small batches of a file are joined into slices of
at least 4 Mi tokens; a slice of one batch of 2- or 4-byte numbers is a view of the map, any other is copied when it
opens. Source: datasets 2.14, arrow_dataset.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats import external
from forebay.formats.tables import is_list

STATE_FILE = "state.json"
_MAX_STATE_BYTES = 64 << 20


class SavedDataset(external.ExternalDataset):
    """The files of one saved dataset, in its order; one row is one document."""

    def __init__(self, path: Path, column: str | None = None) -> None:
        files = files_of(path)
        self._batches = [_batches_of(file, column) for file in files]
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}
        parts: list[external.ExternalSlice] = []
        kinds: set[np.dtype[Any]] = set()
        for i, (file, batches) in enumerate(zip(files, self._batches)):
            counts = [len(lists.flatten()) for lists in batches]
            start = 0
            for k, (a, b) in enumerate(_join(counts)):
                kind, count, rows = _kind_of(file, batches[a]), sum(counts[a:b]), sum(map(len, batches[a:b]))
                kinds.add(kind)
                self._runs[i, start] = a, b
                name, num_bytes = f"{external.shown_name(path, file)}#{k:05d}", count * kind.itemsize
                parts.append(external.ExternalSlice(i, name, start, count, rows, num_bytes))
                start += count
        dtype = external.common_dtype(path, kinds) if kinds else "U32"
        super().__init__(path, "arrow", dtype, files, external.fingerprints(files), parts)

    def _read(self, part: external.ExternalSlice) -> tuple[NDArray[Any], external.U64]:
        a, b = self._runs[part.file, part.start]
        path = self.files[part.file]
        batches = self._batches[part.file][a:b]
        lengths = np.concatenate([pc.list_value_length(lists).to_numpy(zero_copy_only=False) for lists in batches])
        values = [lists.flatten() for lists in batches]
        if (lengths < 0).any() or any(value.null_count for value in values):
            raise DatasetError(f"{path}: expected lists of token ids without gaps, got others. Write it again.")
        pieces = [external.as_tokens(value.to_numpy(zero_copy_only=True), path) for value in values]
        tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return tokens, np.cumsum(lengths, dtype=np.uint64)


def files_of(path: Path) -> list[Path]:
    """Return the files of a saved dataset, in order. Raises DatasetError if state.json is damaged, or selects rows."""
    state_file = path / STATE_FILE
    try:
        state = orjson.loads(external.read_head(state_file, _MAX_STATE_BYTES))
        names = [file["filename"] for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{state_file}: expected the names of a saved dataset's files, got {error!r}.") from error
    if state.get("_indices_files"):
        raise DatasetError(
            f"{path}: expected rows in the order of their files, got a dataset that was shuffled or selected from. "
            "Save it again after flatten_indices()."
        )
    if not all(isinstance(n, str) and n not in ("", ".", "..") and "/" not in n and n.isprintable() for n in names):
        raise DatasetError(f"{state_file}: expected names of files beside it, got {str(names)[:200]}.")
    return [path / name for name in names]


def _batches_of(path: Path, column: str | None) -> list[Any]:
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            names = (
                [column] if column is not None else [n for n in external.TOKEN_COLUMNS if n in reader.schema.names][:1]
            )
            if not names or names[0] not in reader.schema.names:
                raise DatasetError(
                    f"{path}: expected a column of token lists ({column or ' or '.join(external.TOKEN_COLUMNS)}), got "
                    f"{', '.join(reader.schema.names)[:500]}. Say column=…, or tokenize text first with "
                    "`forebay prepare`."
                )
            batches = [batch.column(names[0]) for batch in reader if len(batch)]
            for lists in batches:
                _kind_of(path, lists)
                lists.validate()
                if lists.null_count:
                    raise DatasetError(f"{path}: expected a list in every row of {names[0]}, got none in some.")
            return batches
    except OSError as error:
        raise external.unreadable(path, error) from error
    except (pa.ArrowException, ValueError) as error:
        raise DatasetError(
            f"{path}: expected a stream of Arrow batches, got: {error}. Write or fetch it again."
        ) from error


def _kind_of(path: Path, lists: Any) -> np.dtype[Any]:
    kind = lists.type
    if is_list(kind) and pa.types.is_integer(kind.value_type):
        dtype: np.dtype[Any] = np.dtype(kind.value_type.to_pandas_dtype())
        return dtype
    raise DatasetError(f"{path}: expected lists of integers, got {kind}. Name another column, or write it again.")


def _join(counts: list[int]) -> Iterator[tuple[int, int]]:
    first, total = 0, 0
    for i, count in enumerate(counts):
        total += count
        if total >= external.MAX_COPIED_TOKENS or i == len(counts) - 1:
            if total:
                yield first, i + 1
            first, total = i + 1, 0
