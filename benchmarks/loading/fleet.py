"""The peers' processes: found interpreters, one child a peer, asked in turns, so that no one is in another's way.

A peer that fails at anything is told of as "not measured: why", and measuring goes on with the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.loading import peers

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0
_SETS = {"hf_map": "hf", "hf_stream": "hf", "mosaic": "mosaic", "bare": "", "bare_take": "", "forebay": ""}
"""Peers that do not share the general environment: their versions of common libraries conflict. "": our own."""


class NotMeasuredError(Exception):
    """A peer gave no figure; the text says why."""


def folder_of_peers() -> Path:
    """Where scripts/peers.sh puts the environments: FOREBAY_LOADER_PEERS, or .venv-peers-loaders."""
    return Path(os.environ.get("FOREBAY_LOADER_PEERS", ROOT / ".venv-peers-loaders"))


def interpreter(name: str) -> str:
    """The Python that has the peer's library.

    Raises:
        NotMeasuredError: If it was not made.
    """
    group = _SETS.get(name, "general")
    path = folder_of_peers() / group / "bin/python" if group else Path(sys.executable)
    if not path.exists():
        raise NotMeasuredError(f"no {path}; run scripts/peers.sh loaders")
    return str(path)


def clean_environment(**more: str) -> dict[str, str]:
    """As users have it, offline, with no word of ranks that are not meant."""
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    plain = {key: value for key, value in os.environ.items() if key not in ranks | {"PYTHONDONTWRITEBYTECODE"}}
    return {**plain, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **more}


class Process:
    """One child. `ask` waits for its answer; `send` and `receive` let several work at once."""

    def __init__(self, name: str, corpus: Path, **environment: str) -> None:
        self.name, self.began = name, time.perf_counter()
        self.log = (corpus / f"{name}.log").open("ab")
        self.child = subprocess.Popen(
            [interpreter(name), "-m", "benchmarks.loading.child", name, str(corpus)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, cwd=ROOT,
            env=clean_environment(**environment), bufsize=0,  # `select` sees no line that lies in a buffer.
        )  # fmt: skip

    def send(self, do: str, **what: Any) -> None:
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
            self.child.stdin.flush()

    def receive(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The answer.

        Raises:
            NotMeasuredError: If it is an error, none comes in time, or the process ended.
        """
        assert self.child.stdout is not None
        if not select.select([self.child.stdout], [], [], timeout_s)[0]:
            raise NotMeasuredError(f"no answer in {timeout_s:.0f} s")
        line = self.child.stdout.readline()
        if not line:
            raise NotMeasuredError(f"its process ended with {self.child.wait()}; see {self.name}.log")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NotMeasuredError(str(answer["error"]))
        return answer

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.send(do, **what)
        return self.receive()

    def close(self) -> None:
        """End it: politely, as libraries tidy shared memory at exit; after 15 s not."""
        assert self.child.stdin is not None and self.child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        try:
            self.child.wait(15)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()
        self.log.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Entry:
    """What is known of a peer: how tables name it, and why it was not measured, if so."""

    name: str
    label: str
    detail: str = ""
    versions: str = ""
    stored_bytes: int = 0
    state: bool = False
    elastic: str = ""
    failed: dict[str, str] = field(default_factory=dict)


def prepare(names: Sequence[str], corpus: Path) -> list[Entry]:
    """Have every peer write the corpus in its format, and say what it is."""
    entries = []
    for name in names:
        entry = Entry(name, peers.find(name).LABEL)
        entries.append(entry)
        try:
            with Process(name, corpus) as process:
                written, offers = process.ask("write"), process.ask("offers")
        except NotMeasuredError as error:
            entry.failed["writing"] = str(error)
            print(f"  {entry.label}: not measured: {error}", file=sys.stderr)
            continue
        entry.versions, entry.stored_bytes, entry.detail = written["versions"], written["bytes"], written["detail"]
        entry.state, entry.elastic = offers["state"], offers["elastic"]
    return entries
