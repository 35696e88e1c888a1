"""Records as the batches that stages take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from forebay.formats.records import Record, batched
from forebay.prepare.documents import SCHEMA


def to_batches(records: Iterable[Record], batch_bytes: int = 4 << 20) -> Iterator[pa.RecordBatch]:
    """Yield batches of `SCHEMA` with the records without a problem, of about `batch_bytes` of text each."""
    for some in batched(records, lambda record: len(record.text), batch_bytes, 4096):
        columns = [[getattr(r, "index" if f.name == "place" else f.name) for r in some] for f in SCHEMA]
        arrays = [pa.array(values, f.type) for values, f in zip(columns, SCHEMA, strict=True)]
        yield pa.record_batch(arrays, schema=SCHEMA)
