"""Records as the batches that stages take."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from forebay.formats.records import Record, batched
from forebay.prepare.documents import SCHEMA, Stage


def to_batches(records: Iterable[Record], batch_bytes: int = 4 << 20) -> Iterator[pa.RecordBatch]:
    """Yield batches of `SCHEMA` with the records without a problem, of about `batch_bytes` of text each."""
    for some in batched(records, lambda record: len(record.text), batch_bytes, 4096):
        columns = [[getattr(r, "index" if f.name == "place" else f.name) for r in some] for f in SCHEMA]
        arrays = [pa.array(values, f.type) for values, f in zip(columns, SCHEMA, strict=True)]
        yield pa.record_batch(arrays, schema=SCHEMA)


def to_batch(
    texts: Sequence[str], languages: Sequence[str | None] | None = None, **fields: Sequence[str]
) -> pa.RecordBatch:
    """Return one batch of these texts, with other fields of their records, and a column `language` if there are any."""
    others = [dict(zip(fields, values)) for values in zip(*fields.values())] or [{}] * len(texts)
    records = [Record(i, text=text, **other) for i, (text, other) in enumerate(zip(texts, others))]
    (batch,) = to_batches(records, batch_bytes=1 << 40)
    return batch if languages is None else batch.append_column("language", pa.array(languages, pa.string()))


def drop_codes(stage: Stage, texts: Sequence[str], *languages: Sequence[str | None], **fields: Any) -> list[int]:
    """Return the index of the reason why the stage drops each text; -1 where it keeps it."""
    return stage.apply(to_batch(texts, *languages, **fields)).drop.tolist()


def drop_reasons(stage: Stage, texts: Sequence[str], *languages: Any, **fields: Any) -> list[str]:
    """Return why the stage drops each text; "" where it keeps it."""
    return [stage.reasons[index] if index >= 0 else "" for index in drop_codes(stage, texts, *languages, **fields)]


def stage_texts(stage: Stage, texts: Sequence[str]) -> list[str]:
    """Return the texts as the stage leaves them; check that it keeps the rows, each as if it were alone."""
    batch = to_batch(texts)
    full = stage.apply(batch)
    assert full.batch.column("place").to_pylist() == list(range(len(texts)))
    assert full.drop.shape == (len(texts),) and full.batch.schema.field("text").type == pa.large_string()
    result = full.batch.column("text").to_pylist()
    pieces = [stage.apply(batch.slice(i, 1)) for i in range(len(texts))]
    assert [piece.batch.column("text")[0].as_py() for piece in pieces] == result
    assert [int(piece.drop[0]) for piece in pieces] == full.drop.tolist()
    return result
