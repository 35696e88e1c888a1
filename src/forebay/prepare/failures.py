"""Attempts of tasks that failed: an object each in the work of a run, `failed/STEP-NAME.json`, and how they are shown.

A process that has an exception in a task writes the object itself, as it may be on a machine that shares nothing but
the store; of a process that died the engine writes it. An object is replaced by that of the next attempt, and goes with
the work of the run.
"""

from __future__ import annotations

import json
import os
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from forebay.errors import ForebayError
from forebay.files import HOST
from forebay.prepare.stats import peak_bytes
from forebay.storage.store import Store
from forebay.units import format_bytes

FOLDER = "failed/"
LOG_BYTES = 16 << 10  # Of the last output of a process, and of a traceback.
_MAX_LISTED, _MAX_INPUTS = 100, 20


@dataclass(frozen=True)
class Failure:
    """An attempt that failed.

    Args:
        kind: `error`: the task raised one; `memory`: it ran out of it; `died`: its process died; `lost`: its machine is
            gone, or the process that had claimed it gives no sign.
        attempt: From 1, over all processes and calls.
        log: The last that the process wrote to standard error, "" where the engine does not have it.
    """

    kind: Literal["error", "memory", "died", "lost"]
    task: str
    reason: str
    step: str = ""
    inputs: list[str] = field(default_factory=list)
    host: str = ""
    node: str = ""
    pid: int = 0
    attempt: int = 1
    failed_at: float = field(default_factory=time.time)
    traceback: str = ""
    log: str = ""
    peak_bytes: int = 0


def failure_of(error: Exception, label: str) -> Failure:
    """Of an exception of a task in this process."""
    lines = "".join(traceback.format_exception(error))[-LOG_BYTES:]
    reason = f"{type(error).__name__}: {error}"
    kind: Literal["error", "memory"] = "memory" if isinstance(error, MemoryError) else "error"
    return Failure(
        kind, label, reason, host=HOST, pid=os.getpid(), traceback=lines, peak_bytes=peak_bytes()
    )  # fmt: skip


def write_failure(store: Store, step: str, name: str, task: Any, failure: Failure) -> None:
    """Write the object of a failed attempt of a task; without an error, as there is one to report already."""
    path = f"{FOLDER}{step}-{name}.json"
    split = getattr(task, "split", None)
    inputs = [file.path for file in getattr(split, "files", ())[:_MAX_INPUTS]]
    with suppress(OSError, ForebayError):
        attempt = 1
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            attempt = json.loads(store.read(path))["attempt"] + 1
        data = asdict(replace(failure, step=step, inputs=inputs, attempt=attempt))
        store.write(path, json.dumps(data).encode("utf-8", "replace"))


def read_failures(work: Store) -> list[dict[str, Any]]:
    """The last failed attempt of each task that is not finished, latest first; at most 100."""
    failures = []
    for path in list(work.sizes(FOLDER))[:_MAX_LISTED]:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            entry = json.loads(work.read(path))
            name = path.removeprefix(f"{FOLDER}{entry['step']}-")
            if not work.exists(f"done/{entry['step']}/{name}"):
                failures.append({**asdict(Failure("error", "", "")), **entry})
    return sorted(failures, key=lambda entry: -entry["failed_at"])


def render_failures(failures: Sequence[Mapping[str, Any]]) -> str:
    """For a terminal: each failed task with where it ran, its traceback and the last output of its process."""
    lines: list[str] = []
    for failure in failures:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure["failed_at"]))
        host = " ".join(filter(None, (failure["host"] or "an unknown host", failure["node"])))
        lines += ["", f"failed task: {failure['task']}"]
        lines.append(f"  {failure['step']}, attempt {failure['attempt']}, {moment}, process {failure['pid']} of {host}")
        if failure["peak_bytes"]:
            lines.append(f"  memory of the process: at most {format_bytes(failure['peak_bytes'])}")
        lines += textwrap.wrap(failure["reason"], 100, initial_indent="  ", subsequent_indent="  ")
        lines += [f"  input: {path}" for path in failure["inputs"]]
        for title, text in (("traceback", failure["traceback"]), ("standard error, the last of it", failure["log"])):
            if text:
                lines += [f"  {title}:", *(f"    {line}" for line in text.rstrip().splitlines())]
    return "\n".join("".join(c if c.isprintable() else "�" for c in line) for line in lines)
