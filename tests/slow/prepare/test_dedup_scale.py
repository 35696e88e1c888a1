"""Deduplication of very long texts, and of ten times the documents."""

import os
import subprocess
import sys

import pyarrow as pa
import pytest

from forebay.prepare.dedup.cutting import Cutter
from forebay.prepare.dedup.methods import Dedup
from support.dedup_bench import Bench, drop_codes


@pytest.mark.parametrize("filler", ["word ", "a"])
def test_texts_of_30_megabytes(tmp_path, filler: str):
    bench, text = Bench(tmp_path), filler * ((30 << 20) // len(filler.encode()))
    config = Dedup(exact=True, minhash=True, lines=True)
    texts = pa.array(["good", text, "another", text + " end", "good"], pa.large_string())
    result = bench.deduplicate([bench.sign(texts, config)], config)
    assert drop_codes(result)[0::2] == [0, 0, 1] and drop_codes(result)[1] == 0
    assert Cutter(result.cut[0]).cut(texts, 0).slice(0, 1).to_pylist() == ["good"]


LARGE = """
import resource, sys, tempfile
import numpy as np, pyarrow as pa
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.dedup.deduplicate import Signer, deduplicate
from forebay.storage.store import FolderStore, open_store
config = Dedup(exact=True, minhash=True, lines=True, min_characters=4, keep="longest")
rng = np.random.default_rng(0)
def peak(documents):
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(folder)
        with Signer(store, "p", config) as signer:
            for start in range(0, documents, 1000):
                chosen = rng.integers(0, documents, 1000).tolist()
                texts = pa.array([f"{i} text {i % 977} of {i * i}" for i in chosen], pa.large_string())
                signer.add(pa.record_batch({"text": texts}))
        def map(run, tasks):
            return [run(task, 0) for task in tasks]
        result = deduplicate([signer.signed], config, store, map, memory_bytes=2 << 20)
        assert result.dropped[0] > documents // 4
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
peak(1000)
print(peak(10_000), peak(100_000))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
def test_ten_times_the_documents_take_the_same_memory():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    small, large = (int(word) / 1024 for word in done.stdout.split())
    # Signatures alone are 13 MB more, their records 22 MB, twice that while they are sorted at once.
    assert large - small < 12, f"{small:.0f} MiB with 10 000 documents, {large:.0f} MiB with 100 000"
