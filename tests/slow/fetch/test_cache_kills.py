"""A cache whose process is killed while it fetches."""

import subprocess
import sys

import numpy as np

from forebay.fetch.cache import ChunkCache
from forebay.fetch.chunk_file import PRESENT, UNVERIFIED, MapLayout
from support.cached import CHUNK, content, disk_bytes, info_of, put_chunks

BUDGET = 3 * (4 * CHUNK + MapLayout(len(content(0)), CHUNK).disk_bytes)
CHILD = """
import os, signal, sys
import numpy as np
from forebay.fetch.cache import ChunkCache
from support.cached import CHUNK, content, info_of, leaves_of, put_chunks, write
cache = ChunkCache(sys.argv[1], int(sys.argv[2]))
put_chunks(cache, content(0), CHUNK, [0, 1])
entry = cache.open(info_of(content(1), CHUNK))
chunks = np.arange(4)
cache.pin([(entry, chunks)])
entry.set_leaves(leaves_of(content(1), CHUNK))
assert len(cache.claim(entry, chunks)[0]) == 4
write(entry.path, content(1), CHUNK, [0, 1])
entry.marks[0] = 1
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_has_neither_pins_nor_reservations(tmp_path):
    cache = ChunkCache(tmp_path, BUDGET)
    assert subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), str(BUDGET)]).returncode == -9
    second = cache.open(info_of(content(1), CHUNK))
    chunks = np.arange(4)
    assert second.marks[0] == PRESENT and second.verify(chunks)  # It was verified before it was marked.
    assert second.marks[0] == PRESENT and second.marks[1] not in (PRESENT, UNVERIFIED)
    cache.pin([(second, chunks)])
    assert cache.claim(second, chunks)[0].tolist() == [1, 2, 3]  # The dead process had claimed them.
    cache.complete(second, chunks[1:])
    put_chunks(cache, content(2), CHUNK, [0, 1, 2, 3])
    put_chunks(cache, content(3), CHUNK, [0, 1])
    assert disk_bytes(tmp_path) <= cache.budget_bytes and cache.used_bytes() <= cache.budget_bytes
