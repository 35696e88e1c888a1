"""Each format by its own library: `write(corpus, out)`, and `open_documents(place)` for reading by number.

A document is an item, as in what `forebay convert` writes. Imports lie in the functions: every library has an
interpreter of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convert.corpus import load

SHARD_BYTES = 64 << 20
SHARD_DOCUMENTS = 32_000  # 64 MiB of documents of 1000 tokens


@dataclass(frozen=True)
class Reader:
    """`count` documents, `get(i)` one of them. None of `get`: no random access."""

    count: int
    get: Callable[[int], Any]


@dataclass(frozen=True)
class Peer:
    """`group`: which environment has it ("": our own). `read` is of what `forebay convert` wrote, too."""

    label: str
    group: str
    package: str
    write: Callable[[Path, Path], None]
    read: Callable[[Path], Reader] | None


def _runs(corpus: Path) -> Iterator[tuple[Any, Any]]:
    """Tokens and document ends within them, a shard's worth at a time."""
    tokens, document_ends = load(corpus)
    for first in range(0, len(document_ends), SHARD_DOCUMENTS):
        last = min(first + SHARD_DOCUMENTS, len(document_ends))
        start = int(document_ends[first - 1]) if first else 0
        yield tokens[start : int(document_ends[last - 1])], document_ends[first:last] - start


def _documents(corpus: Path) -> Iterator[Any]:
    tokens, document_ends = load(corpus)
    return (tokens[start:stop] for start, stop in pairwise([0, *document_ends.tolist()]))


def write_megatron(corpus: Path, out: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    out.mkdir()
    builder = IndexedDatasetBuilder(str(out / "peer_text_document.bin"), dtype=np.uint16)
    for tokens in _documents(corpus):
        builder.add_document(torch.from_numpy(tokens.copy()), [len(tokens)])
    builder.finalize(str(out / "peer_text_document.idx"))


def read_megatron(path: Path) -> Reader:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (index,) = path.glob("*.idx")
    dataset = IndexedDataset(str(index.with_suffix("")))
    return Reader(len(dataset), dataset.__getitem__)


def write_parquet(corpus: Path, out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("input_ids", pa.list_(pa.uint16()))])
    out.mkdir()
    for number, (tokens, document_ends) in enumerate(_runs(corpus)):
        offsets = pa.array(np.append(0, document_ends).astype(np.int32))
        rows = pa.ListArray.from_arrays(offsets, pa.array(tokens))
        table = pa.Table.from_arrays([rows], schema=schema)
        pq.write_table(
            table, out / f"{number:05d}.parquet", compression="zstd", row_group_size=4096, write_page_checksum=True
        )


def write_safetensors(corpus: Path, out: Path) -> None:
    from safetensors.numpy import save_file

    out.mkdir()
    for number, (tokens, document_ends) in enumerate(_runs(corpus)):
        tensors = {"tokens": np.ascontiguousarray(tokens), "document_ends": document_ends.astype(np.uint64)}
        save_file(tensors, out / f"{number:05d}.safetensors")


PEERS = {
    "megatron": Peer(
        "megatron-core, IndexedDatasetBuilder", "megatron", "megatron-core", write_megatron, read_megatron
    ),
    "parquet": Peer("pyarrow, write_table", "", "pyarrow", write_parquet, None),
    "forebay": Peer("safetensors, save_file", "", "safetensors", write_safetensors, None),
}


def versions(name: str) -> str:
    """Of the library that writes a format."""
    return f"{PEERS[name].package} {version(PEERS[name].package)}"
