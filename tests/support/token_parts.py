"""Helpers of the tests of encode, shuffle, slicing and rows: parts of documents, and their tokens read back."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.dataset.agreement import TOKENIZER_FILE
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.prepare.tasks.encode import EncodeTask, TextPart, encode
from forebay.prepare.tasks.shuffle import EncodedPart
from forebay.prepare.tokenize.encoders import EncoderSpec
from forebay.prepare.tokenize.tokenizers import load_tokenizer
from forebay.storage.store import open_store

SCHEMA = pa.schema(
    [("place", pa.int64()), ("id", pa.large_string()), ("url", pa.large_string()), ("text", pa.large_string())]
)


def text_part(folder: Path, texts: list[str], batch_rows: int = 1000, name: str = "") -> TextPart:
    folder.mkdir(parents=True, exist_ok=True)
    name = name or hashlib.sha256(json.dumps(texts).encode("utf-8", "surrogatepass")).hexdigest()
    path = folder / f"{name}.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for start in range(0, len(texts), batch_rows):
            rows = texts[start : start + batch_rows]
            columns = [range(start, start + len(rows)), [f"id{start + i}" for i in range(len(rows))]]
            columns += [[""] * len(rows), rows]
            writer.write(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA)], schema=SCHEMA))
    return TextPart(path.name, len(texts), name)


def coder(folder: Path, spec: str = "bytes", **policy: Any) -> EncoderSpec:
    result = load_tokenizer(spec, **policy)
    store = open_store(folder / result.sha256[:16])
    store.write(TOKENIZER_FILE, result.data)
    return EncoderSpec.of(result, store)


def documents(folder: Path, parts: list[EncodedPart]) -> list[list[int]]:
    """Every document's tokens."""
    store = open_store(folder)
    result = []
    for part in parts:
        tokens = store.read_array(part.object("tokens"), TOKEN_DTYPES[part.dtype])
        stops = store.read_array(part.object("ends"), "<u8").astype(int).tolist()
        assert len(stops) == part.documents and len(tokens) == part.tokens
        result += [tokens[start:stop].tolist() for start, stop in pairwise([0, *stops])]
    return result


def encoded(folder: Path, texts: list[str], **options: Any) -> list[EncodedPart]:
    """The part of these texts as bytes; none if there is no document."""
    task = EncodeTask(text_part(folder, texts), coder(folder), open_store(folder), **options)
    result = encode(task)
    return [result.part] if result.documents_out else []
