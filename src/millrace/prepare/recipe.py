"""Raw text to a dataset: find, cut, encode, slice, and say what was done.

Hides: the working directory `OUT/.work`, in which finished tasks outlive a killed run. The same inputs and recipe
give the same bytes for any number of workers and any number of interruptions. Needs room for the tokens twice while
it runs.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.dataset.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TABLE_FILE,
    TOKEN_DTYPES,
    Manifest,
    SliceInfo,
    SliceTable,
    dataset_id,
)
from millrace.dataset.reader import open_dataset
from millrace.dataset.slices import TOKEN_HEADER_BYTES, atomic_write, sync_directory
from millrace.errors import PrepareError, UsageError
from millrace.prepare.inputs import Piece, Source, cut, find_sources
from millrace.prepare.tasks import (
    Encoded,
    EncodeTask,
    SliceTask,
    encode,
    finished,
    finished_slice,
    map_tasks,
    write_slice,
)
from millrace.prepare.tokenizer import TokenizerFile, load_tokenizer, train_tokenizer, vocab_to_train

MIN_SLICE_BYTES = 4096
TOKENIZER_FILE = "tokenizer.json"
REJECTS_FILE = "rejects.jsonl"


@dataclass(frozen=True)
class Progress:
    """How far one stage (`encode` in bytes of input, `slice` in slices) has come."""

    stage: str
    done: int
    total: int
    unit: str


@dataclass(frozen=True)
class PrepareSummary:
    """What came of it. `already_there` if the directory held this very dataset before."""

    dataset: str
    id: str
    documents_in: int
    documents_out: int
    tokens: int
    slices: int
    dropped: dict[str, int] = field(default_factory=dict)
    already_there: bool = False

    def to_json(self) -> dict[str, Any]:
        """What `millrace prepare --json` prints: the same for the same inputs and recipe."""
        names = ("dataset", "id", "documents_in", "documents_out", "tokens", "slices", "dropped")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class _Recipe:
    out: Path
    tokenizer: str
    name: str
    slice_bytes: int
    workers: int
    seed: int
    keep_ids: Path | None
    text_key: str
    max_bad_fraction: float
    report: Callable[[Progress], None]

    @property
    def work(self) -> Path:
        return self.out / ".work"


def prepare(
    inputs: Sequence[str | Path],
    out: Path | str,
    *,
    tokenizer: str,
    name: str | None = None,
    slice_bytes: int = 64 << 20,
    workers: int | None = None,
    seed: int = 0,
    keep_ids: Path | None = None,
    text_key: str = "text",
    max_bad_fraction: float = 0.05,
    on_progress: Callable[[Progress], None] | None = None,
) -> PrepareSummary:
    """Make a dataset of layout `tokens` of raw text; run again after a crash, it goes on where it was.

    Args:
        inputs: JSONL (plain, .gz, .zst), Parquet, UTF-8 text files (one document each), directories of these.
        out: The dataset's directory; made if need be.
        tokenizer: A tokenizer.json, a directory with one, a hub name, `bytes`, or `train:VOCAB`.
        name: The dataset's name; by default that of `out`.
        slice_bytes: No slice file is larger; all but the last are within 1 % of it, 64 KiB and up.
        workers: Processes; by default one a core. The bytes do not depend on it.
        seed: For the sample that `train:` learns from.
        keep_ids: If given, the source id of each kept document goes here, one a line: its `id` in the input,
            else `path:line` (or row), or the path of a text file.
        text_key: The field or column with the text.
        max_bad_fraction: Share of malformed documents above which nothing is made. Below it they are left out,
            counted, and listed in `rejects.jsonl`.
        on_progress: Called in this thread.

    Raises:
        UsageError: If an argument cannot be, or `out` holds another dataset or is in use.
        PrepareError: If an input is missing or damaged, there is no document, the disk is full, or a worker dies.
    """
    out = Path(out)
    if slice_bytes < MIN_SLICE_BYTES:
        raise UsageError(f"slice_bytes: expected at least {MIN_SLICE_BYTES}, got {slice_bytes}.")
    if workers is not None and workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    recipe = _Recipe(
        out=out,
        tokenizer=tokenizer,
        name=name or out.resolve().name or "dataset",
        slice_bytes=slice_bytes,
        workers=workers or cores,
        seed=seed,
        keep_ids=keep_ids,
        text_key=text_key,
        max_bad_fraction=max_bad_fraction,
        report=on_progress or (lambda progress: None),
    )
    vocab = vocab_to_train(tokenizer)
    known = load_tokenizer(tokenizer) if vocab is None else None
    sources = find_sources(inputs, recipe.workers, leave_out=out)
    lineage = _lineage(recipe, sources, known)
    with _errors(out), _locked(recipe):
        done = _already_there(recipe, lineage)
        if done is not None:
            shutil.rmtree(recipe.work, ignore_errors=True)
            return done
        pieces = cut(sources)
        used = known or _trained(recipe, pieces, vocab or 0)
        return _make(recipe, pieces, used, lineage)


def _lineage(recipe: _Recipe, sources: Sequence[Source], known: TokenizerFile | None) -> dict[str, Any]:
    return {
        "inputs": [{"name": s.name, "bytes": s.bytes, "sha256": s.sha256} for s in sources],
        "recipe": {
            "tokenizer": known.description if known else recipe.tokenizer,
            "tokenizer_sha256": known.sha256 if known else None,
            "slice_bytes": recipe.slice_bytes,
            "seed": recipe.seed,
            "text_key": recipe.text_key,
        },
        "versions": {package: version(package) for package in ("millrace", "tokenizers", "pyarrow")},
    }


@contextmanager
def _errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PrepareError(
                f"{out}: no space left on the device. Finished work is kept: make room (the tokens twice), "
                "then run the same command again."
            ) from error
        raise PrepareError(f"{error.filename or out}: cannot write the dataset: {error.strerror or error}.") from error


@contextmanager
def _locked(recipe: _Recipe) -> Iterator[None]:
    if recipe.out.exists() and not recipe.out.is_dir():
        raise UsageError(f"prepare: expected --out to be a directory, got {recipe.out}, which is a file.")
    recipe.out.mkdir(parents=True, exist_ok=True)
    # On the directory itself: a lock file would have to be left or be removed while another waits for it.
    descriptor = os.open(recipe.out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"prepare: another prepare writes to {recipe.out}. Wait for it, or choose another."
            ) from error
        yield
    finally:
        os.close(descriptor)


def _already_there(recipe: _Recipe, lineage: dict[str, Any]) -> PrepareSummary | None:
    if not (recipe.out / MANIFEST_FILE).exists():
        if (recipe.out / "slices").exists() and not recipe.work.exists():
            raise UsageError(
                f"prepare: {recipe.out / 'slices'} is not from an unfinished run. Choose another directory."
            )
        return None
    dataset = open_dataset(recipe.out)
    theirs = dataset.manifest.lineage
    same = all(theirs.get(key) == lineage[key] for key in ("inputs", "recipe"))
    if not same or dataset.name != recipe.name or (recipe.keep_ids is not None and not recipe.keep_ids.exists()):
        raise UsageError(
            f"prepare: expected an empty directory, got {recipe.out}, which holds dataset {dataset.name!r} "
            f"({dataset.id[:12]}…). A dataset never changes: choose another directory, or remove this one."
        )
    m = dataset.manifest
    counts = theirs["counts"]
    return PrepareSummary(
        m.name, dataset.id, counts["documents_in"], m.documents, m.tokens, m.slices, counts["dropped"], True
    )


def _trained(recipe: _Recipe, pieces: Sequence[Piece], vocab: int) -> TokenizerFile:
    facts = json.dumps([[[s.sha256 for s in p.sources], p.start, p.stop] for p in pieces])
    key = hashlib.sha256(f"{vocab} {recipe.seed} {recipe.text_key} {version('tokenizers')} {facts}".encode())
    path = recipe.work / f"trained-{key.hexdigest()[:32]}" / TOKENIZER_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, train_tokenizer(pieces, recipe.text_key, vocab, recipe.seed).data)
    found = load_tokenizer(str(path))
    return TokenizerFile(recipe.tokenizer, found.data, found.vocab_size, found.eos_id)


def _make(recipe: _Recipe, pieces: list[Piece], used: TokenizerFile, lineage: dict[str, Any]) -> PrepareSummary:
    tasks_folder = recipe.work / "tasks"
    tasks_folder.mkdir(parents=True, exist_ok=True)
    (recipe.out / "slices").mkdir(exist_ok=True)
    atomic_write(recipe.out / TOKENIZER_FILE, used.data)
    tasks = [
        EncodeTask(
            piece=piece,
            tokenizer=str(recipe.out / TOKENIZER_FILE),
            tokenizer_sha256=used.sha256,
            description=used.description,
            dtype=used.dtype,
            eos_id=used.eos_id,
            text_key=recipe.text_key,
            with_ids=recipe.keep_ids is not None,
            folder=str(tasks_folder),
        )
        for piece in pieces
    ]
    encoded = _encode_all(recipe, tasks)
    dropped = _check(recipe, tasks, encoded)
    table = _slice_all(recipe, tasks, encoded)
    if recipe.keep_ids is not None:
        atomic_write(recipe.keep_ids, _kept_ids(tasks, encoded))
    documents_in = sum(result.documents_in for result in encoded)
    data = table.to_parquet()
    manifest = Manifest(
        format=FORMAT_VERSION,
        name=recipe.name,
        layout="tokens",
        dtype=used.dtype,
        tokenizer=used.description,
        vocab_size=used.vocab_size,
        eos_id=used.eos_id,
        tokens=sum(result.tokens for result in encoded),
        rows=0,
        documents=sum(result.documents_out for result in encoded),
        slices=len(table),
        bytes=int(table.bytes.sum()),
        table_sha256=hashlib.sha256(data).hexdigest(),
        lineage={
            **lineage,
            "counts": {"documents_in": documents_in, "dropped": dropped},
            "files": {TOKENIZER_FILE: used.sha256},
        },
    )
    _forget_other_slices(recipe, len(table))
    atomic_write(recipe.out / TABLE_FILE, data)
    whole = manifest.to_json()
    atomic_write(recipe.out / MANIFEST_FILE, whole)
    shutil.rmtree(recipe.work)
    return PrepareSummary(
        recipe.name, dataset_id(whole), documents_in, manifest.documents, manifest.tokens, len(table), dropped
    )


def _encode_all(recipe: _Recipe, tasks: list[EncodeTask]) -> list[Encoded]:
    results: list[Encoded | None] = [finished(task) for task in tasks]
    sizes = [
        task.piece.stop - task.piece.start if task.piece.kind == "jsonl" else sum(s.bytes for s in task.piece.sources)
        for task in tasks
    ]
    done = sum(size for size, result in zip(sizes, results) if result is not None)
    recipe.report(Progress("encode", done, sum(sizes), "B"))
    # Two pieces with the same contents are one task: run it once.
    first: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if results[index] is None:
            first.setdefault(task.name, index)
    todo = list(first.values())

    def note(position: int, result: Encoded) -> None:
        nonlocal done
        results[todo[position]] = result
        done += sizes[todo[position]]
        recipe.report(Progress("encode", done, sum(sizes), "B"))

    map_tasks(encode, [tasks[index] for index in todo], recipe.workers, note)
    return [result or results[first[task.name]] or Encoded() for task, result in zip(tasks, results)]


def _places(tasks: Sequence[EncodeTask], encoded: Sequence[Encoded]) -> Iterator[tuple[EncodeTask, Encoded, int]]:
    """Each task with the number, in its file, of its first line or row."""
    base, path = 0, ""
    for task, result in zip(tasks, encoded):
        here = task.piece.sources[0].path
        base, path = (base if here == path and task.piece.start else 0), here
        yield task, result, base
        base += result.places


def _where(task: EncodeTask, place: int, base: int) -> str:
    if task.piece.kind == "text":
        return task.piece.sources[place].path
    return f"{task.piece.sources[0].path}:{base + place + 1}"


def _check(recipe: _Recipe, tasks: Sequence[EncodeTask], encoded: Sequence[Encoded]) -> dict[str, int]:
    """What was dropped, by reason; rejects.jsonl is written."""
    rejects = [
        {"where": _where(task, place, base), "reason": reason}
        for task, result, base in _places(tasks, encoded)
        for place, reason in result.rejects
    ]
    path = recipe.out / REJECTS_FILE
    if rejects:
        atomic_write(path, b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rejects))
    else:
        path.unlink(missing_ok=True)
    documents_in = sum(result.documents_in for result in encoded)
    if len(rejects) > recipe.max_bad_fraction * documents_in:
        first = "; ".join(f"{r['where']}: {r['reason']}" for r in rejects[:3])
        raise PrepareError(
            f"prepare: expected at most {recipe.max_bad_fraction:.1%} malformed documents, got {len(rejects)} of "
            f"{documents_in}: {first}. All are in {path}. Mend them, or raise --max-bad."
        )
    if not sum(result.documents_out for result in encoded):
        raise PrepareError(
            f"prepare: expected documents with text, got none ({documents_in} read, all empty or malformed)."
        )
    dropped: dict[str, int] = {}
    for result in encoded:
        for reason, n in result.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + n
    return dict(sorted(dropped.items()))


def _kept_ids(tasks: Sequence[EncodeTask], encoded: Sequence[Encoded]) -> Iterator[bytes]:
    for task, _, base in _places(tasks, encoded):
        with task.file("ids").open("rb") as file:
            for line in file:
                place, name = json.loads(line)
                name = task.piece.sources[place].path if task.piece.kind == "text" else name
                text = name or _where(task, place, base)
                yield text.replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n"


def _slice_all(recipe: _Recipe, tasks: Sequence[EncodeTask], encoded: Sequence[Encoded]) -> SliceTable:
    todo = list(_plan_slices(recipe, tasks, encoded))
    found: list[tuple[int, str] | None] = [finished_slice(task) for task in todo]
    missing = [index for index, result in enumerate(found) if result is None]
    done = len(todo) - len(missing)
    recipe.report(Progress("slice", done, len(todo), " slices"))

    def note(position: int, result: tuple[int, str]) -> None:
        nonlocal done
        found[missing[position]] = result
        done += 1
        recipe.report(Progress("slice", done, len(todo), " slices"))

    # A process costs half a second to start: below 256 MiB one is as quick.
    workers = recipe.workers if len(missing) * recipe.slice_bytes > 256 << 20 else 1
    map_tasks(write_slice, [todo[index] for index in missing], workers, note)
    rows = []
    for task, result in zip(todo, found):
        assert result is not None
        count = sum(stop - start for _, start, stop in task.parts)
        rows.append(SliceInfo(task.index, task.name, *result, count, task.last_end - task.first_end))
    sync_directory(recipe.out / "slices")
    return SliceTable.from_rows(rows)


def _plan_slices(recipe: _Recipe, tasks: Sequence[EncodeTask], encoded: Sequence[Encoded]) -> Iterator[SliceTask]:
    starts = np.concatenate([[0], np.cumsum([result.tokens for result in encoded])]).astype(np.int64)
    ends_path = recipe.work / "ends"
    with ends_path.open("wb") as file:
        for task, start in zip(tasks, starts.tolist()):
            file.write((np.fromfile(task.file("ends"), "<u8") + np.uint64(start)).data)
    ends = np.memmap(ends_path, "<u8", "r").view(np.ndarray)
    itemsize = TOKEN_DTYPES[tasks[0].dtype].itemsize
    plan = hashlib.sha256(json.dumps([[t.name for t in tasks], recipe.slice_bytes]).encode()).hexdigest()[:32]
    start, first_end, index = 0, 0, 0
    while start < starts[-1]:
        stop, last_end = next_cut(ends, start, first_end, int(starts[-1]), itemsize, recipe.slice_bytes)
        yield SliceTask(
            plan=plan,
            index=index,
            start=start,
            parts=tuple(_parts(tasks, starts, start, stop)),
            dtype=tasks[0].dtype,
            ends=str(ends_path),
            first_end=first_end,
            last_end=last_end,
            out=str(recipe.out),
            work=str(recipe.work),
        )
        start, first_end, index = stop, last_end, index + 1


def next_cut(
    ends: NDArray[np.uint64], start: int, first_end: int, total: int, itemsize: int, slice_bytes: int
) -> tuple[int, int]:
    """Where the slice that begins at token `start` stops: as late as header, tokens and ends fit in `slice_bytes`.

    Args:
        ends: U64 [D], exclusive ends of all documents in the whole stream, rising.
        first_end: Index of the first end after `start`.
        total: Tokens in the whole stream.

    Returns:
        The stop, and the index after the last document end in (start, stop].
    """
    budget = slice_bytes - TOKEN_HEADER_BYTES
    low, high = start + 1, min(total, start + budget // itemsize)
    # All ends that can matter, so that each probe searches a short run.
    near = ends[first_end : first_end + budget // 8 + 1]
    while low < high:
        middle = (low + high + 1) // 2
        inside = int(np.searchsorted(near, np.uint64(middle), "right"))
        if (middle - start) * itemsize + 8 * inside <= budget:
            low = middle
        else:
            high = middle - 1
    return low, first_end + int(np.searchsorted(near, np.uint64(low), "right"))


def _parts(
    tasks: Sequence[EncodeTask], starts: NDArray[np.int64], start: int, stop: int
) -> Iterator[tuple[str, int, int]]:
    index = int(np.searchsorted(starts, start, "right")) - 1
    while index < len(tasks) and starts[index] < stop:
        base = int(starts[index])
        first, last = max(start, base) - base, min(stop, int(starts[index + 1])) - base
        if last > first:
            yield str(tasks[index].file("tokens")), first, last
        index += 1


def _forget_other_slices(recipe: _Recipe, count: int) -> None:
    """Remove what an earlier, unfinished run left: slices of another plan, temporary files."""
    wanted = {f"{index:06d}.safetensors" for index in range(count)}
    for path in (recipe.out / "slices").iterdir():
        if path.name not in wanted:
            path.unlink()
    for path in recipe.out.glob(".*.tmp"):
        path.unlink()
