"""A dataset that Hugging Face `datasets` saved with save_to_disk: a column of token lists in Arrow files.

state.json names the Arrow streams in order. Rows are documents. The small batches of a file are joined into slices of
at least 4 Mi tokens; a slice of one batch of 2- or 4-byte numbers is a view of the map, any other is copied when it
opens. Source: datasets 2.14, arrow_dataset.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from forebay.arrays import U64, Array
from forebay.errors import DatasetError, UsageError
from forebay.formats import external
from forebay.formats.columns import common_schema
from forebay.formats.layout import layout_of_tokens
from forebay.formats.records import batched

STATE_FILE = "state.json"
_MAX_STATE_BYTES = 64 << 20


class SavedDataset(external.ExternalDataset):
    """The files of one saved dataset, in its order; one row is one document."""

    def __init__(self, path: Path, column: str | None) -> None:
        files = files_of(path)
        schemas = [saved_schema(file) for file in files]
        chosen, self.left_out = layout_of_tokens(path, common_schema(files, schemas), column, external.REMEDY)
        self._batches = [_batches_of(file, chosen) for file in files]
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}
        parts = []
        kind = np.dtype(schemas[0].field(chosen).type.value_type.to_pandas_dtype())
        for i, (file, batches) in enumerate(zip(files, self._batches)):
            counts = [len(lists.flatten()) for lists in batches]
            runs = batched(range(len(counts)), counts.__getitem__, external.MAX_COPIED_TOKENS, len(counts))
            start = 0
            for k, run in enumerate(run for run in runs if any(counts[index] for index in run)):
                self._runs[i, start] = a, b = run[0], run[-1] + 1
                count, rows = sum(counts[a:b]), sum(map(len, batches[a:b]))
                name, num_bytes = f"{external.shown_name(path, file)}#{k:05d}", count * kind.itemsize
                parts.append(external.ExternalSlice(i, name, start, count, rows, num_bytes))
                start += count
        super().__init__(path, "arrow", external.stored_dtype(kind), files, external.fingerprints(files), parts)

    def _read(self, part: external.ExternalSlice) -> tuple[Array, U64]:
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


def check_split(path: Path) -> None:
    """Raise UsageError if a directory is several saved datasets, each in a directory of its own."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in path.glob(f"*/{STATE_FILE}"))
        raise UsageError(
            f"{path}: expected one dataset, got the splits {', '.join(splits)[:300] or 'of none'}. Name the directory "
            f"of one: {path / (splits or ['SPLIT'])[0]}."
        )


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
    if not names or not all(
        isinstance(n, str) and n not in ("", ".", "..") and "/" not in n and n.isprintable() for n in names
    ):
        raise DatasetError(f"{state_file}: expected names of files beside it, got {str(names)[:200]}.")
    return [external.below(path, path / name) for name in names]


@contextmanager
def _stream(path: Path) -> Iterator[Any]:
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            yield reader
    except OSError as error:
        raise external.unreadable(path, error) from error
    except (pa.ArrowException, ValueError) as error:
        raise DatasetError(
            f"{path}: expected a stream of Arrow batches, got: {error}. Write or fetch it again."
        ) from error


def saved_schema(path: Path) -> pa.Schema:
    """Return the columns of a file. Raises DatasetError if it is damaged."""
    with _stream(path) as reader:
        return reader.schema


def _batches_of(path: Path, column: str) -> list[Any]:
    with _stream(path) as reader:
        columns = (batch.column(column) for batch in reader if len(batch))
        batches = [getattr(lists, "storage", lists) for lists in columns]  # A tensor stores a list.
        for lists in batches:
            lists.validate()
            if lists.null_count:
                raise DatasetError(f"{path}: expected a list in every row of {column}, got none in some.")
        return batches
