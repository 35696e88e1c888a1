"""A small mirror of CommonCrawl's file tree: WET files of one gzip member a record, and their list."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

CRAWL = "CC-MAIN-2026-30"


def record(number: int, text: bytes) -> bytes:
    """Return a member with a `conversion` record."""
    head = (
        f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://site{number}.example/\r\n"
        f"WARC-Date: 2026-07-0{number % 9 + 1}T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:{number}>\r\n"
        f"WARC-Identified-Content-Language: eng,deu\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    return gzip.compress(head.encode() + text + b"\r\n\r\n", mtime=0)


def write_mirror(root: Path, num_files: int = 5, num_records: int = 20, record_bytes: int = 300) -> list[str]:
    """Write a crawl of random words below `root`; return the paths in its list."""
    chance = random.Random(7)
    folder = root / "crawl-data" / CRAWL
    (folder / "segments/1/wet").mkdir(parents=True)
    paths = []
    for index in range(num_files):
        path = folder / f"segments/1/wet/{CRAWL}-{index:05}.warc.wet.gz"
        texts = (chance.randbytes(record_bytes // 2).hex().encode() for _ in range(num_records))
        path.write_bytes(b"".join(record(index * num_records + n, text) for n, text in enumerate(texts)))
        paths.append(path.relative_to(root).as_posix())
    (folder / "wet.paths.gz").write_bytes(gzip.compress("".join(f"{path}\n" for path in paths).encode()))
    return paths


def index_lines(root: Path, path: str) -> list[dict[str, Any]]:
    """Return the results of the index of CommonCrawl for the records of a file."""
    data, offset, lines = (root / path).read_bytes(), 0, []
    while offset < len(data):
        member = zlib.decompressobj(31)
        url = member.decompress(data[offset:]).split(b"Target-URI: ")[1].split(b"\r\n")[0].decode()
        length = len(data) - offset - len(member.unused_data)
        location = {"filename": path, "offset": str(offset), "length": str(length)}
        lines.append({"urlkey": "example", "timestamp": "20260701000000", "url": url, **location})
        offset += length
    return lines


def write_index(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path
