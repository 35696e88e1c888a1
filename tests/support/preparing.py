"""Inputs written, read and prepared in this process."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from forebay.formats.inputs import ReadOptions
from forebay.formats.records import Record
from forebay.prepare import PrepareResult
from forebay.prepare.driver import prepare_dataset
from forebay.prepare.inputs import find_inputs, read_split, split_files


class InProcessWorker:
    """Runs the stages of a recipe as a `SandboxWorker` does, in this process and without limits."""

    def call(self, run: Callable[[Any, Any], Any], task: Any, data: Any, limits: tuple[float, int]) -> Any:
        return run(task, data)


def stay_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tasks of prepare fork nothing; `tests/slow/prepare/test_sandbox.py` has the forks."""

    def run_here(run):
        with suppress(Exception):
            run()
        return "", ""

    monkeypatch.setattr("forebay.prepare.tasks.stages.worker_for", lambda stages, warm: InProcessWorker())
    monkeypatch.setattr("forebay.prepare.tasks.text.run_in_fork", run_here)
    monkeypatch.setattr("multiprocessing.set_start_method", lambda method: None)  # as the command does


def write_jsonl(path: Path, rows: Iterable[str | Mapping[str, Any]]) -> Path:
    """Write a line for each text, or for each object, packed as the suffix says."""
    objects = [{"text": row} if isinstance(row, str) else row for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.output_stream(path) as file:
        file.write(b"".join(json.dumps(row).encode() + b"\n" for row in objects))
    return path


def read_records(inputs: Any, **options: Any) -> list[Record]:
    """Return all records of the inputs but blank ones, with `ReadOptions(**options)`."""
    chosen = ReadOptions(**options)
    splits = split_files(find_inputs(inputs, chosen).files, chosen)
    return [record for split in splits for record in read_split(split, chosen) if record.problem != "blank"]


def good_texts(inputs: Any, **options: Any) -> list[str]:
    return [record.text for record in read_records(inputs, **options) if not record.problem]


def problems(inputs: Any, **options: Any) -> list[str]:
    return [record.problem for record in read_records(inputs, **options) if record.problem]


def prepare(inputs: Any, out: Path | str, **options: Any) -> PrepareResult:
    """Prepare one input or a list; by default a token is a byte, and all runs in this process."""
    listed = inputs if isinstance(inputs, list | tuple) else [inputs]
    return prepare_dataset(listed, out, **{"tokenizer": "bytes", "workers": 1, **options})


def read_lines(path: Path) -> list:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
