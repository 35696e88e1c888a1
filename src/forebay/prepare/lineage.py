"""Where each document of a dataset came from: `documents.parquet`, beside the slices and fixed by the manifest.

Row n is document n, counting document ends from 0, slice after slice: its id in the input (or where it stood), the
name of the input file, and its URL if it has one. Some 10 to 40 bytes a document on disk, a block of rows in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.dataset.slices import hash_file
from forebay.prepare.collect import Corpus
from forebay.prepare.read.base import Piece
from forebay.prepare.read.listing import shown_path
from forebay.prepare.text import place_name
from forebay.prepare.tokens.shuffle import TokenPart
from forebay.storage.atomic import open_atomic

SCHEMA = pa.schema([("id", pa.string()), ("source", pa.string()), ("url", pa.string())])
_ROWS = 1 << 16


def write_documents(path: Path, corpus: Corpus, parts: Sequence[TokenPart]) -> str:
    """Write the table of these parts' documents, in their order; its sha256 in hex."""
    pieces: dict[str, tuple[Piece, int]] = {}
    for piece, text, base in zip(corpus.pieces, corpus.texts, corpus.bases):
        pieces.setdefault(text.part(corpus.folder).name, (piece, base))
    with open_atomic(path) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as table:
        found = _rows(pieces, parts)
        while rows := list(islice(found, _ROWS)):
            table.write_table(pa.table([pa.array(column) for column in zip(*rows)], schema=SCHEMA), _ROWS)
    return hash_file(path)


def _rows(pieces: dict[str, tuple[Piece, int]], parts: Sequence[TokenPart]) -> Iterator[tuple[str, str, str]]:
    for part in parts:
        with part.file("ids").open("rb") as lines:
            for line in lines:
                name, place, given, url, inner = json.loads(line)
                piece, base = pieces[name]
                source = piece.sources[place if len(piece.sources) > 1 else 0]
                # As the input is named in the lineage: not where it lay.
                there = source.name + place_name(piece, place, inner, base).removeprefix(shown_path(source.path))
                yield given or there, source.name, url
