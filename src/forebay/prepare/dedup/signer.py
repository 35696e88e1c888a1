"""Signs the documents of a split batch by batch: writes the files that a deduplication compares. Memory: O(batch).

With a prefix `P`, little-endian, one row a document in the order of the split: `P.NAME` u64 [documents, columns] of
each method; `P.weight` f64 [documents]: the greatest stays (only if not the first copy does); `P.counts` u32
[documents] and `P.units` u64 [sum of counts, 2]: the lines that are long enough; `P.signatures`: JSON,
written last. That is 16 + 8 bands bytes a document (128 by default), and 16 a line.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from forebay.errors import PrepareError
from forebay.files import atomic_write, open_atomic
from forebay.prepare.dedup.kernels import hash_texts
from forebay.prepare.dedup.methods import Dedup


@dataclass(frozen=True)
class Signed:
    """The contents of `P.signatures`: documents, lines, settings by ending, the files' SHA-256."""

    documents: int
    units: int
    settings: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""


class Signer:
    """Writes the signatures of a split, `prefix` and an ending. A context manager; an exception leaves no file."""

    def __init__(self, prefix: Path, config: Dedup) -> None:
        self._prefix = Path(prefix)
        self._config = config
        self._documents = self._units = 0
        self._sha256: dict[str, Any] = {}
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Signer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)
            return
        for ending in [*self._config.signature(), *(["counts"] if self._config.unit else [])]:
            self._file(ending)
        self._stack.close()
        each = [[ending, self._sha256[ending].hexdigest()] for ending in sorted(self._files)]
        sha256 = hashlib.sha256(json.dumps(each).encode()).hexdigest()
        signed = Signed(self._documents, self._units, self._config.signature(), sha256)
        atomic_write(self._path("signatures"), json.dumps(asdict(signed)).encode())

    def add(self, batch: pa.RecordBatch) -> None:
        """Sign the next documents."""
        config = self._config
        self._documents += batch.num_rows
        for method in config.methods:
            keys = np.ascontiguousarray(method.sign(batch), "<u8")
            if keys.shape != (batch.num_rows, method.columns):
                raise PrepareError(
                    f"dedup method {method.name}: expected keys of shape {(batch.num_rows, method.columns)}, got "
                    f"{keys.shape}."
                )
            self._write(method.name, keys)
        if config.unit:
            hashes, counts = hash_texts(
                batch.column("text"), config.unit, config.normalise_of(config.unit), config.min_characters
            )
            self._units += len(hashes)
            self._write("units", hashes)
            self._write("counts", counts.astype("<u4"))
        if config.keep != "first":
            self._write("weight", np.asarray(pc.binary_length(batch.column("text")), np.float64))

    def _path(self, ending: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.{ending}")

    def _file(self, ending: str) -> BinaryIO:
        if ending not in self._files:
            self._files[ending] = self._stack.enter_context(open_atomic(self._path(ending)))
            self._sha256[ending] = hashlib.sha256()
        return self._files[ending]

    def _write(self, ending: str, array: NDArray[Any]) -> None:
        self._file(ending).write(array.data)
        self._sha256[ending].update(array.data)


def read_signed(prefix: str, config: Dedup) -> Signed:
    """The description of the signatures at a prefix; PrepareError unless they were made with these settings."""
    path = Path(f"{prefix}.signatures")
    try:
        signed = Signed(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise PrepareError(f"{path}: expected finished signatures, got {error}. Sign the documents again.") from error
    for ending, expected in config.signature().items():
        actual = signed.settings.get(ending, "none")
        if actual != expected:
            raise PrepareError(
                f"{path}: expected signatures of settings {expected} ({ending}), got {actual}. "
                "What is compared must be signed alike: use the same [dedup] settings, or sign again."
            )
    return signed
