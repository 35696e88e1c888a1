"""The ids that `prepare_dataset(document_ids=True)` stores."""

from pathlib import Path

import pyarrow.parquet as pq


def document_ids(out: Path) -> list[str]:
    """The source id of each document of a dataset, in its order."""
    ids: list[str] = pq.read_table(out / "documents.parquet")["id"].to_pylist()
    return ids
