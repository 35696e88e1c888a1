"""One measurement in a fresh process: `python -m benchmarks.loading.remote.task NAME`, then a line of JSON.

It says "ready" when what it needs is imported, begins when it is told to, and answers with one line of JSON, in which
`wall_s` and `cpu_s` are its own, from there to its end.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.loading.fleet import ROOT, NotMeasuredError, clean_environment, interpreter
from benchmarks.measure import cpu_s


class Task:
    """A process that waits to begin. `python`: the peer in whose interpreter it runs, if not ours."""

    def __init__(self, name: str, environment: dict[str, str], python: str = "", **what: Any) -> None:
        self.child = subprocess.Popen(
            [interpreter(python) if python else sys.executable, "-m", "benchmarks.loading.remote.task", name], cwd=ROOT,
            env=clean_environment(**environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(what) + "\n")
        self.child.stdin.flush()

    def ready(self) -> Task:
        """Wait until it is."""
        assert self.child.stdout is not None
        if self.child.stdout.readline() != "ready\n":
            self.result()
        return self

    def begin(self) -> Task:
        """Tell it to."""
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        return self

    def result(self, patience_s: float = 600.0) -> dict[str, Any]:
        """Its answer.

        Raises:
            NotMeasuredError: With the last line of its stderr, if it gave none.
        """
        try:
            out, err = self.child.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.child.kill()
            out, err = self.child.communicate()
            raise NotMeasuredError(f"no answer in {patience_s:.0f} s") from None
        lines = out.splitlines()
        if not lines or not lines[-1].startswith("{"):
            messages = [
                line for line in err.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)
            ]
            raise NotMeasuredError((messages or ["no answer"])[-1][:200])
        if os.environ.get("FOREBAY_BENCH_STDERR"):
            sys.stderr.write(err)
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer


def open_loader(what: dict[str, Any]) -> Any:
    """The Loader of what was asked for; `state` is loaded."""
    import forebay

    settings = dict(what["loader"])
    order = forebay.OrderOptions(lanes=settings.pop("lanes", None))
    loader = forebay.Loader(what["url"], cache_dir=what["cache"], order=order, **settings)
    if what.get("state"):
        loader.load_state_dict(what["state"])
    return loader


def epoch(what: dict[str, Any]) -> dict[str, Any]:
    """All batches, thrown away."""
    loader = open_loader(what)
    for _ in loader:
        pass
    return loader.stats()


def first(what: dict[str, Any]) -> dict[str, Any]:
    """Up to the first batch; `after` batches more before its state is told."""
    began = time.perf_counter()
    loader = open_loader(what)
    batches = iter(loader)
    next(batches)
    took = time.perf_counter() - began
    stats = loader.stats()
    for _ in range(what.get("after", 0)):
        next(batches)
    return {"first_s": took, "state": loader.state_dict(), **stats}


def steps(what: dict[str, Any]) -> dict[str, Any]:
    """A trainer that reads `bytes_per_s`, by sleeping: its waits after the first batch.

    `waits`: (when, how long), in seconds since the first batch, of those for slices on their way; `made_s`: the rest.
    """
    loader = open_loader(what)
    batches = iter(loader)
    next(batches)
    step_s = loader.run.batches.largest * loader.seq_len * 2 / what["bytes_per_s"]
    began = due = time.perf_counter()
    waits, made_s = [], 0.0
    while True:
        due += step_s
        time.sleep(max(0.0, due - time.perf_counter()))
        asked = time.perf_counter()
        before_s = loader.waits.seconds["network"]
        batch = next(batches, None)
        got = time.perf_counter()
        network_s = loader.waits.seconds["network"] - before_s
        made_s += got - asked - network_s
        if network_s > 1e-3:
            waits.append((asked - began, network_s))
            due = got
        if batch is None:
            return {"elapsed_s": got - began, "waits": waits, "made_s": made_s, **loader.stats()}


def plain(what: dict[str, Any]) -> dict[str, Any]:
    """All slices by obstore, `connections` at once, each in one request: `written` and `hashed`, or thrown away."""
    import obstore
    from obstore.store import S3Store

    store = S3Store("bucket", prefix=what["prefix"], client_options={"allow_http": True})

    def fetch(name: str) -> int:
        data = obstore.get(store, name).bytes()
        if what["written"]:
            path = Path(what["cache"]) / name
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.write(file, data)
            if what["hashed"]:
                hashlib.sha256(data).digest()
                os.fsync(file)
            os.close(file)
            path.unlink()
        return len(data)

    with ThreadPoolExecutor(what["connections"]) as pool:
        return {"fetched_bytes": sum(pool.map(fetch, what["names"]))}


def main(name: str) -> None:
    """Run one task."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    what = json.loads(sys.stdin.readline())
    task: Callable[[dict[str, Any]], dict[str, Any]]
    if name == "peer":
        from benchmarks.loading.remote import peers

        task = peers.open_task(what)
    else:
        task = globals()[name]
        for module in ("obstore",) if name == "plain" else ("obstore", "forebay.load.loader"):
            importlib.import_module(module)
    answers.write("ready\n")
    sys.stdin.readline()
    wall, cpu = time.perf_counter(), cpu_s()
    answer = task(what)
    answer |= {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu}
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
