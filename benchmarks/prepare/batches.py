"""Records as the batches that stages take, for benchmarks and tests."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from forebay.formats.records import Record, batched
from forebay.prepare.documents import SCHEMA


def to_batches(records: Iterable[Record], batch_bytes: int = 4 << 20) -> Iterator[pa.RecordBatch]:
    """Batches of `SCHEMA` of the records without a problem, of about `batch_bytes` of text each."""
    for some in batched(records, lambda record: len(record.text), batch_bytes, 4096):
        yield pa.record_batch(
            [pa.array([getattr(r, "index" if f.name == "place" else f.name) for r in some], f.type) for f in SCHEMA],
            schema=SCHEMA,
        )
