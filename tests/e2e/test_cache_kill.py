"""Four processes share one cache, killed and begun anew: within the budget at every look from outside, and whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from forebay.cache.cache import SliceCache
from support.calibration import scaled

NUM_SLICES = 24
SLICE_BYTES = 200_000
BUDGET = 9 * SLICE_BYTES
ROUNDS = int(os.environ.get("FOREBAY_KILL_SEEDS", "6"))

# Transfers that write slowly, at any place of the file, with a trailer, as the real ones do.
READER = """
import hashlib, random, sys, threading, time
from pathlib import Path
import numpy as np
from forebay.cache.cache import SliceCache
from forebay.cache.prefetch import SliceFeed

directory, size, slices, budget, rank, passes = sys.argv[1], *map(int, sys.argv[2:])
contents = [np.random.default_rng(key).bytes(size) for key in range(slices)]
names = [hashlib.sha256(content).hexdigest() for content in contents]
chance = random.Random(rank)
order = [chance.sample(range(slices), slices) for _ in range(passes)]
reads = [key for keys in order for key in keys]

class Slow:
    def __init__(self, key, part):
        self.done, self.error, self.received, self.calls = threading.Event(), None, 0, []
        self.stopped, self.lock = threading.Event(), threading.Lock()
        threading.Thread(target=self.run, args=(key, part), daemon=True).start()

    def run(self, key, part):
        with part.open("r+b" if part.exists() else "w+b") as file:
            file.truncate(size + 2)
            for piece in chance.sample(range(4), 4):
                if self.stopped.wait(0.001):
                    self.error = ConnectionError("cancelled")
                    break
                file.seek(piece * size // 4)
                file.write(contents[key][piece * size // 4 : (piece + 1) * size // 4])
                file.flush()
            else:
                file.truncate(size)
        with self.lock:
            self.done.set()
        for call in self.calls:
            call(self)

    def cancel(self):
        self.stopped.set()

    def wait(self, timeout):
        return self.done.wait(timeout)

    def on_done(self, call):
        with self.lock:
            if not self.done.is_set():
                return self.calls.append(call)
        call(self)

def uses(start, stop):
    steps = np.arange(start, stop)
    return steps, np.array(reads)[start:stop]

feed = SliceFeed(
    SliceCache(directory, budget), names, np.full(slices, size), uses, len(reads), Slow
)
feed.seek(0)
print("ready", flush=True)
for step, key in enumerate(reads):
    if hashlib.sha256(feed.acquire(key, step + 1).read_bytes()).hexdigest() != names[key]:
        sys.exit("a slice that was handed out is wrong")
    feed.advance(step + 1)
feed.close()
print("done", feed.stats()["fetched_slices"], flush=True)
"""


def start(directory: Path, rank: int, passes: int) -> subprocess.Popen[str]:
    numbers = (SLICE_BYTES, NUM_SLICES, BUDGET, rank, passes)
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(directory), *map(str, numbers)], stdout=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def stopped(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """A moment at which nothing moves, so that a listing is true."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.send_signal(signal.SIGSTOP)
    for process in alive:
        while process.poll() is None and _state(process.pid) not in "TZ":
            time.sleep(0.0002)
    yield
    for process in alive:
        process.send_signal(signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def look(directory: Path) -> int:
    """Bytes of all the cache's files, from outside; each whole slice is what its name says."""
    total = 0
    for path in directory.iterdir():
        if re.fullmatch(r"[0-9a-f]{64}(\.part)?", path.name):
            total += path.stat().st_size
            if path.suffix != ".part":
                assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    return total


def test_four_processes_within_the_budget_and_killed_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(7)
    readers = [start(tmp_path, rank, 40) for rank in range(4)]
    looks, max_value = 0, 0
    try:
        for reader in readers:
            assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        for round_ in range(ROUNDS):
            deadline = time.monotonic() + chance.uniform(0.1, 0.5)
            while time.monotonic() < deadline:
                with stopped(readers):
                    used = look(tmp_path)
                assert used <= BUDGET, f"{used} of {BUDGET} bytes in round {round_}"
                looks, max_value = looks + 1, max(max_value, used)
                time.sleep(chance.uniform(0, 0.02))
            victim = chance.randrange(4)
            readers[victim].kill()
            readers[victim].communicate()
            readers[victim] = start(tmp_path, victim, 40)
        assert looks > 5 and max_value > BUDGET // 2
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    # What is left is whole, and the next start needs no help: it resumes, cleans up, and reads all.
    last = start(tmp_path, 9, 1)
    reported, _ = last.communicate(timeout=scaled(60))
    assert last.returncode == 0 and reported.startswith("ready\ndone ")
    assert look(tmp_path) <= BUDGET
    assert not list((tmp_path / "futures").iterdir())
    SliceCache(tmp_path, BUDGET).clean(())
    assert not list(tmp_path.glob("*.part"))


def test_four_processes_that_read_the_same_fetch_each_slice_once(tmp_path: Path) -> None:
    budget = (NUM_SLICES + 1) * SLICE_BYTES
    numbers = (SLICE_BYTES, NUM_SLICES, budget)
    command = [sys.executable, "-c", READER, str(tmp_path), *map(str, numbers)]
    readers = [subprocess.Popen([*command, str(rank), "2"], stdout=subprocess.PIPE, text=True) for rank in range(4)]
    fetched = []
    for reader in readers:
        reported, _ = reader.communicate(timeout=scaled(60))
        assert reader.returncode == 0
        fetched.append(int(reported.split()[-1]))
    assert sum(fetched) == NUM_SLICES
