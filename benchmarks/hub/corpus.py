"""The repository that is streamed: Parquet files of prose from a seed, with the columns of FineWeb-Edu.

Row groups of 1000 rows, snappy: what the hub's large text sets have. The prose is that of `benchmarks.prepare.corpus`
where the data lies here, and of Python's own documentation elsewhere.
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.hub.subjects import NAME
from benchmarks.loading.fleet import ROOT

ROW_GROUP = 1000
_MEAN_BYTES = 4000  # Of a document; FineWeb-Edu's have 4.8 kB.


def make_hub(folder: Path, files: int, file_bytes: int) -> Path:
    """A hub's directory with that many files of so many bytes of text, and the model `gpt2`; an old one is kept."""
    hub = folder / f"hub-{files}x{file_bytes}"
    if (hub / ".done").exists():
        return hub
    sys.path.insert(0, str(ROOT / "tests"))
    repos = importlib.import_module("support.hub_repos")
    repo = repos.write_repo(hub / "datasets" / NAME)
    repos._models(hub / "models")
    pool, chance = _pool(), random.Random(0)
    for number in range(files):
        path = repo / f"data/train-{number:05d}-of-{files:05d}.parquet"
        path.parent.mkdir(exist_ok=True)
        _write(path, number, pool, chance, file_bytes)
    (hub / ".done").touch()
    return hub


def _pool() -> list[str]:
    from benchmarks.prepare import corpus

    try:
        return corpus.passages(corpus.data_folder())
    except SystemExit:
        from pydoc_data.topics import topics

        return [part for topic in topics.values() for part in topic.split("\n\n") if len(part) > 40]


def _write(path: Path, number: int, pool: list[str], chance: random.Random, num_bytes: int) -> None:
    texts: list[str] = []
    remaining = num_bytes
    while remaining > 0:
        max_chars, parts = int(chance.expovariate(1 / _MEAN_BYTES)) + 200, []
        while max_chars > 0:
            parts.append(chance.choice(pool)[:max_chars])
            max_chars -= len(parts[-1]) + 2
        texts.append("\n\n".join(parts))
        remaining -= len(texts[-1].encode())
    rows = len(texts)
    columns = {
        "text": texts,
        "id": [f"<urn:uuid:{number:08x}-0000-4000-8000-{row:012x}>" for row in range(rows)],
        "dump": ["CC-MAIN-2024-10"] * rows,
        "url": [f"https://example.org/{number}/{chance.getrandbits(64):x}" for _ in range(rows)],
        "file_path": [f"s3://commoncrawl/crawl-data/CC-MAIN-2024-10/{row % 90}.warc.gz" for row in range(rows)],
        "language": ["en"] * rows,
        "language_score": [chance.random() for _ in range(rows)],
        "token_count": [len(text) // 4 for text in texts],
        "score": [chance.uniform(2.5, 5) for _ in range(rows)],
        "int_score": [3] * rows,
    }
    pq.write_table(pa.table(columns), path, row_group_size=ROW_GROUP, compression="snappy")
