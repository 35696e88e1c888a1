"""LitData: index.json against its chunks, and the tokens where it holds nothing else.

A chunk, little endian: u32 n items, u32 offsets [n + 1] from its first byte, the items.
Source: litdata 0.2, litdata/streaming/writer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from forebay.doctor.datasets import FETCH, Look
from forebay.doctor.report import Options
from forebay.doctor.tokens import TokenCounts, Window, spans
from forebay.doctor.verdicts import PREPARE_AGAIN, judge
from forebay.errors import DatasetError
from forebay.formats.foreign import Bytes8, head_of, map_file

INDEX_FILE = "index.json"
_MOST_INDEX = 256 << 20
_TYPES = {13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}  # Of its table of tensor types.


def is_index(folder: Path) -> bool:
    """Whether a directory's index.json is LitData's, by its first key and its last ones."""
    path = folder / INDEX_FILE
    if not path.is_file():
        return False
    head = head_of(path, 4096)
    names = (b'"chunks"', b'"chunk_bytes"') if b'"chunks"' in head else (b'"data_format"',)
    return head.lstrip()[:1] == b"{" and all(name in head for name in names)


def examine_litdata(path: Path, options: Options) -> Look:
    """Each chunk against the index: there, of its size, with as many items, whose offsets rise to the end."""
    look = Look(path)
    try:
        index = orjson.loads(head_of(path / INDEX_FILE, _MOST_INDEX))
        chunks, config = list(index["chunks"]), dict(index["config"])
        entries = [(str(c["filename"]), int(c["chunk_bytes"]), int(c["chunk_size"])) for c in chunks]
    except (ValueError, KeyError, TypeError, DatasetError) as error:
        look.say("index-mismatch", INDEX_FILE, f"expected LitData's index, got {error!r}")
        return look
    packed = config.get("compression")
    look.facts.update(chunks=len(entries), items=sum(n for _, _, n in entries), format=str(config.get("data_format")))
    look.total_bytes = sum(size for _, size, _ in entries)
    if not entries:
        look.say("empty", INDEX_FILE, "expected chunks, got none")
    kind = _token_kind(config)
    look.counts = counts = TokenCounts(options)
    for name, size, items in entries:
        file = path / name
        if "/" in name or not file.is_file():
            look.say("index-mismatch", name, "expected it beside the index, got none")
            continue
        got = file.stat().st_size
        if packed:
            continue  # The index has the size of what is in it.
        if got != size:
            look.say("index-mismatch", name, f"expected {size} bytes, as the index says, got {got}")
            continue
        memory = map_file(file)
        begin = _check_items(look, name, memory, items)
        if begin and kind is not None:
            _feed(counts, file, memory[begin:], kind, options)
            look.read_bytes += got
    listed = {name for name, _, _ in entries}
    for extra in sorted(p.name for p in path.glob("chunk-*.bin*") if p.name not in listed):
        look.say("index-mismatch", extra, "a chunk that the index does not list", "merge the index again, or remove it")
    look.findings += judge(counts, str(path), PREPARE_AGAIN)
    return look


def _check_items(look: Look, name: str, memory: Bytes8, items: int) -> int:
    """The first byte of the items; 0 if the chunk's head is wrong."""
    count = int.from_bytes(memory[:4].tobytes(), "little")
    begin = 4 + 4 * (count + 1)
    if begin > len(memory):
        look.say("index-mismatch", name, f"expected offsets of {count} items, got {len(memory)} bytes in all")
        return 0
    if items not in (count, 0):
        look.say("index-mismatch", name, f"expected {items} items, as the index says, got {count}")
    offsets = memory[4:begin].view("<u4")
    if bool((offsets == begin).all()):
        return begin  # Tokens of one stream: the writer leaves out where an item begins.
    if int(offsets[0]) != begin or int(offsets[-1]) != len(memory) or bool((offsets[1:] < offsets[:-1]).any()):
        evidence = (
            f"expected offsets that rise from {begin} to {len(memory)}, got {int(offsets[0])} … {int(offsets[-1])}"
        )
        look.say("index-mismatch", name, evidence, FETCH)
        return 0
    return begin


def _token_kind(config: dict[str, Any]) -> np.dtype[Any] | None:
    """The type of tokens where the items are nothing but tokens of one."""
    formats = config.get("data_format")
    if not isinstance(formats, list) or len(formats) != 1 or config.get("compression"):
        return None
    name, _, code = str(formats[0]).partition(":")
    if name != "no_header_tensor" or not code.isdigit() or int(code) not in _TYPES:
        return None
    return np.dtype(_TYPES[int(code)])


def _feed(counts: TokenCounts, file: Path, data: Bytes8, kind: np.dtype[Any], options: Options) -> None:
    tokens = data[: len(data) - len(data) % kind.itemsize].view(kind)
    for start, stop in spans(len(tokens), kind.itemsize, options):
        counts.feed(Window(str(file), start, tokens[start:stop]))
