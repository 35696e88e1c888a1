"""One task in a process of its own: `python -m benchmarks.convert.child ASK`; a line of JSON in the end.

What is measured begins after the imports. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convert import peers
from benchmarks.loading.child import family_cpu_s
from benchmarks.measure import percentile

_LOOKUPS = 2000


def write(ask: dict[str, Any]) -> dict[str, Any]:
    """By the format's own library, or by ours with and without verifying."""
    corpus, out = Path(ask["corpus"]), Path(ask["out"])
    shutil.rmtree(out, ignore_errors=True)
    if ask["who"] == "peer":
        versions_text = peers.versions(ask["format"])
        _warm(ask["format"], corpus)
        wall, cpu = time.perf_counter(), family_cpu_s()
        peers.PEERS[ask["format"]].write(corpus, out)
    else:
        from forebay import __version__
        from forebay.convert import convert
        from forebay.formats.conversion import ConvertOptions

        versions_text = f"forebay {__version__}"
        wall, cpu = time.perf_counter(), family_cpu_s()
        convert(corpus.parent / f"{corpus.name}-forebay", out, ask["format"], ConvertOptions())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": family_cpu_s() - cpu,
        "versions": versions_text,
        "bytes": size,
    }


def _warm(name: str, corpus: Path) -> None:
    """Have the libraries imported before the clock starts."""
    names = {"megatron": ["megatron.core.datasets.indexed_dataset"]}
    for module in names.get(name, []):
        __import__(module)


def read(ask: dict[str, Any]) -> dict[str, Any]:
    """Items one after another for some seconds, and by number at random; they are what was written."""
    path, corpus = Path(ask["out"]), Path(ask["corpus"])
    began = time.perf_counter()
    reader = peers.PEERS[ask["format"]].read(path) if ask["who"] == "peer" else _ours(path)
    opened = time.perf_counter() - began
    _check(reader, corpus)
    tokens = number = 0
    wall, cpu = time.perf_counter(), family_cpu_s()
    while time.perf_counter() - wall < ask["seconds"]:
        for _ in range(16):
            tokens += len(np.array(reader.get(number % reader.count)))  # a copy: a view alone reads nothing
            number += 1
    wall, cpu = time.perf_counter() - wall, family_cpu_s() - cpu
    chance, took = random.Random(1), []
    for _ in range(_LOOKUPS):
        index = chance.randrange(reader.count)
        start = time.perf_counter()
        np.array(reader.get(index))
        took.append(time.perf_counter() - start)
    return {
        "open_s": opened, "tokens": tokens, "wall_s": wall, "cpu_s": cpu,
        "p50_us": percentile(took, 50) * 1e6, "p99_us": percentile(took, 99) * 1e6,
    }  # fmt: skip


def _ours(path: Path) -> peers.Reader:
    """Documents of an open dataset: its slices, mapped, and where each document begins."""
    from forebay import open_dataset

    dataset = open_dataset(path)
    slices = [dataset.open_slice(index) for index in range(dataset.num_slices)]
    document_ends = [item.document_ends for item in slices]
    firsts = np.cumsum([0, *map(len, document_ends)]).tolist()

    def get(number: int) -> Any:
        slice_index = bisect_right(firsts, number) - 1
        own = number - firsts[slice_index]
        return slices[slice_index].tokens[
            int(document_ends[slice_index][own - 1]) if own else 0 : int(document_ends[slice_index][own])
        ]

    return peers.Reader(firsts[-1], get)


def _check(reader: peers.Reader, corpus: Path) -> None:
    from benchmarks.convert.corpus import load

    tokens, document_ends = load(corpus)
    for number in (0, 1, reader.count // 2):
        expected = tokens[int(document_ends[number - 1]) if number else 0 : int(document_ends[number])]
        assert np.array_equal(np.asarray(reader.get(number)).astype(np.int64), expected), f"item {number} differs"


def main(request_json: str) -> None:
    """Do what is asked."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ask = json.loads(request_json)
    try:
        answer = {"write": write, "read": read}[ask["do"]](ask)
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
