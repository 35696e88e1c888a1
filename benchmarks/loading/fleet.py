"""The peers' processes: interpreters that have them, one child a peer, asked in turns, so that none disturbs another.

A peer that fails at anything is reported as "not measured: why", and measuring goes on with the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loading.peers import PEERS, TEXT_PEERS
from benchmarks.measure import median

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0


class NotMeasuredError(Exception):
    """A peer gave no figure; the text says why."""


def install(group: str, variable: str = "FOREBAY_LOADER_PEERS") -> None:
    """Install the peers of `scripts/peers.sh GROUP`, unless a variable names the place of others."""
    if variable not in os.environ:
        command = ["bash", str(ROOT / "scripts/peers.sh"), group]
        if subprocess.run(command, cwd=ROOT).returncode:
            print("benchmarks: not all peers could be installed; those are left out", file=sys.stderr)


def interpreter(name: str) -> str:
    """The Python that has the peer's library.

    Raises:
        NotMeasuredError: If it was not made.
    """
    group = (PEERS | TEXT_PEERS)[name].group
    if not group:
        return sys.executable
    path = Path(os.environ.get("FOREBAY_LOADER_PEERS", ROOT / ".venv-peers-loaders"), group, "bin/python")
    if not path.exists():
        raise NotMeasuredError(f"no {path}; run scripts/peers.sh loaders")
    return str(path)


def clean_environment(**more: str) -> dict[str, str]:
    """As users have it, offline, without ranks that are not meant."""
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    plain = {key: value for key, value in os.environ.items() if key not in ranks | {"PYTHONDONTWRITEBYTECODE"}}
    return {**plain, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **more}


class Process:
    """One child. `ask` waits for its answer; `send` and `receive` let several work at once."""

    def __init__(self, name: str, folder: Path, **environment: str) -> None:
        self.began = time.perf_counter()
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [interpreter(name), "-m", "benchmarks.loading.child", name, str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT,
                env=clean_environment(**environment), bufsize=0,  # `select` sees no line that is in a buffer.
            )  # fmt: skip

    def send(self, do: str, **request: Any) -> None:
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The answer.

        Raises:
            NotMeasuredError: If it is an error, none comes in time, or the process ended.
        """
        assert self.child.stdout is not None
        if not select.select([self.child.stdout], [], [], TIMEOUT_S)[0]:
            raise NotMeasuredError(f"no answer in {TIMEOUT_S:.0f} s")
        line = self.child.stdout.readline()
        if not line:
            raise NotMeasuredError(f"its process ended with {self.child.wait()}; see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NotMeasuredError(str(answer["error"]))
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        self.send(do, **request)
        return self.receive()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        """End it: by closing its input, as libraries tidy shared memory at exit; after 15 s by SIGKILL."""
        assert self.child.stdin is not None and self.child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        try:
            self.child.wait(15)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()


def rank_environments(world: int) -> list[dict[str, str]]:
    """The variables of torchrun for each rank of a world on this machine."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


class Turns:
    """Answers of each subject by kind, over the rounds; one that failed is left out from then on."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, Hashable], list[Any]] = defaultdict(list)
        self.failed: dict[str, str] = {}

    def run(self, name: str, kind: Hashable, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Call the function, unless the subject failed before."""
        if name not in self.failed:
            try:
                self.answers[name, kind].append(function(*args, **options))
            except NotMeasuredError as error:
                self.failed[name] = str(error)

    def median(self, name: str, kind: Hashable, key: str) -> float:
        return median([answer[key] for answer in self.answers[name, kind]])

    def ratio(self, first: str, second: str, kind: Hashable, key: Callable[[Any], float]) -> float:
        """The median of the rounds' own ratios: a slow round slows both."""
        answers = zip(self.answers[first, kind], self.answers[second, kind])
        return median([key(left) / key(right) for left, right in answers])


def prepare(names: Sequence[str], folder: Path) -> Iterator[str]:
    """Have every peer write the corpus in its format; the names of those that could."""
    for name in names:
        try:
            with Process(name, folder) as process:
                written = process.ask("write")
        except NotMeasuredError as error:
            print(f"  {PEERS[name].label}: not measured: {error}", flush=True)
            continue
        print(f"  {PEERS[name].label}: {written['versions']}, {written['bytes'] / 1e6:.0f} MB", flush=True)
        yield name
