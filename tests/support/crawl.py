"""A small mirror of CommonCrawl's file tree: WET files of one gzip member a record, and their list."""

import gzip
import random
from pathlib import Path

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
