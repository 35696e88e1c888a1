"""What the tests of encode, shuffle, slicing and rows share: parts of documents, and their tokens read back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.prepare.tasks.encode import EncodeTask, TextPart, encode
from forebay.prepare.tasks.shuffle import EncodedPart
from forebay.prepare.tokenize.encoders import EncoderSpec
from forebay.prepare.tokenize.tokenizers import load_tokenizer

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
            columns: list[Any] = [range(start, start + len(rows)), [f"id{start + i}" for i in range(len(rows))]]
            columns += [[""] * len(rows), rows]
            writer.write(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA)], schema=SCHEMA))
    return TextPart(str(path), len(texts), name)


def coder(folder: Path, spec: str = "bytes", **policy: Any) -> EncoderSpec:
    result = load_tokenizer(spec, **policy)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.sha256[:16]}.json"
    path.write_bytes(result.data)
    return EncoderSpec.of(result, path)


def documents(parts: list[EncodedPart]) -> list[list[int]]:
    """Every document's tokens."""
    result: list[list[int]] = []
    for part in parts:
        tokens = np.fromfile(part.file("tokens"), TOKEN_DTYPES[part.dtype])
        stops = np.fromfile(part.file("ends"), "<u8").astype(int)
        assert len(stops) == part.documents and len(tokens) == part.tokens
        result += [item.tolist() for item in np.split(tokens, stops[:-1])] if len(stops) else []
    return result


def encoded(folder: Path, texts: list[str], **options: Any) -> list[EncodedPart]:
    """The part of these texts as bytes; none if there is no document."""
    task = EncodeTask(text_part(folder, texts), coder(folder), str(folder), **options)
    result = encode(task)
    return [result.part] if result.documents_out else []
