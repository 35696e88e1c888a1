"""Deduplication that is killed, of very long texts, and of ten times the documents."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from forebay.prepare.dedup.cutting import Cutter
from forebay.prepare.dedup.deduplicate import deduplicate
from forebay.prepare.dedup.methods import Dedup
from forebay.storage.store import open_store
from support.dedup_bench import Bench, drop_codes, make_chains
from support.stores import contents, resuming

KILLED = """
import os, pickle, signal, sys, threading
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.dedup.deduplicate import deduplicate
from forebay.storage.store import FolderStore, open_store
from support.dedup_bench import Bench, drop_codes, make_chains
from support.stores import resuming
left, store = int(sys.argv[3]), FolderStore(sys.argv[2])
def map(run, tasks):
    global left
    done = []
    for task in tasks:
        left -= 1
        if left < 0:
            threading.Event().wait()  # The kill may come late: what was finished would be cleaned up.
        if left == 0:
            threading.Timer(float(sys.argv[4]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        done += resuming(store)(run, [task])
    return done
part = pickle.loads(bytes.fromhex(sys.argv[1]))
deduplicate([part], Dedup(exact=True, minhash=True), store, map, memory_bytes=1 << 16)
"""


@pytest.mark.parametrize("task, delay_s", [(3, 0.0), (16, 0.003)])
def test_killed_and_run_again(tmp_path: Path, task: int, delay_s: float) -> None:
    config, bench = Dedup(exact=True, minhash=True), Bench(tmp_path)
    part = bench.sign(make_chains(), config)
    folder = tmp_path / "killed"
    arguments = [pickle.dumps(part).hex(), str(folder), str(task), str(delay_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    died = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, env=environment)
    assert died.returncode == -signal.SIGKILL
    finished = {path.stem for path in (folder / "done/sort_run").glob("*.json")}
    before = {path.name: path.stat().st_ino for path in (folder / "dedup").glob("*.run") if path.stem in finished}
    assert before
    seen = {}
    store = open_store(folder)

    def map(run, tasks):
        names = resuming(store)(run, tasks)
        seen.update({path.name: path.stat().st_ino for path in (folder / "dedup").glob("*.run")})
        return names

    deduplicate([part], config, store, map, memory_bytes=1 << 16)
    assert {name: seen[name] for name in before} == before  # what was finished was not done again
    undisturbed = bench.deduplicate([part], config, 1 << 16)
    store.remove_stale()
    assert contents(store) == contents(undisturbed.drop[0].store)


@pytest.mark.parametrize("filler", ["word ", "a"])
def test_texts_of_30_megabytes(tmp_path: Path, filler: str) -> None:
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
def test_ten_times_the_documents_take_the_same_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    small, large = (int(word) / 1024 for word in done.stdout.split())
    # Signatures alone are 13 MB more, their records 22 MB, twice that while they are sorted at once.
    assert large - small < 12, f"{small:.0f} MiB with 10 000 documents, {large:.0f} MiB with 100 000"
