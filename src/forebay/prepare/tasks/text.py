"""TEXT tasks: a split of raw input to the documents of it that pass every stage.

A task leaves `NAME.arrow` (the documents, Arrow IPC, LZ4), their signatures, `NAME.stats`, and if there are any
`NAME.rejects` (malformed records, a JSON line each) and `NAME.hits`. It depends on what its name hashes, and on nothing
else. Memory: a few batches of 4 MiB, and the largest document.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa

from forebay.base import Json
from forebay.formats.inputs import InputSplit, ReadOptions, ReadTrace, check_unchanged
from forebay.formats.parquet import read_metadata
from forebay.formats.records import Record
from forebay.prepare.compiled import work_time
from forebay.prepare.dedup.methods import Dedup, Signed
from forebay.prepare.documents import BATCH_BYTES, BATCH_ROWS, SCHEMA, Stage
from forebay.prepare.engines.sandbox import run_in_fork, set_activity
from forebay.prepare.inputs import read_split, text_format
from forebay.prepare.path_lists import downloaded
from forebay.prepare.progress import MAX_LISTED, TaskCounts, tick
from forebay.prepare.sources import DocumentSource, describe_position, first_rows, read_source
from forebay.prepare.stats import StageStats, mix64, text_bytes
from forebay.prepare.tasks.encode import TextPart
from forebay.prepare.tasks.keys import hash_json, hash_source, source_key, versions
from forebay.prepare.tasks.stages import (
    MAX_REJECTS,
    REJECT_CHARACTERS,
    Reject,
    Rejects,
    StagesTask,
    json_line,
    load_for_forks,
    run_stages,
    to_batch,
)
from forebay.prepare.tasks.statistics import write_stats
from forebay.storage.store import Store

if TYPE_CHECKING:
    from forebay.prepare.dedup.deduplicate import Signer

TEXT_VERSION = 6  # Changed when the same split would give other documents or statistics: old results are not used.
_imported: list[bool] = []  # Whether this process has read a document before.
_ARROW_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True)
class TextTask(StagesTask):
    """A split to read and filter; its `recipe_key` is that of `task_key`. `source` reads a split that is no file."""

    read: ReadOptions
    sample: float
    source: DocumentSource | None
    hashes: bool  # Whether the files that begin in it are hashed, which reads all of them.

    @cached_property
    def name(self) -> str:
        """The stem of its files: a hash of the listed files, not of their contents, which only the task reads."""
        sources = [source_key(source) for source in self.split.files]
        return hash_json([self.recipe_key, sources, self.split.start, self.split.stop, repr(self.limits)])

    @property
    def label(self) -> str:
        first, *others = self.split.files
        start = f" from {self.split.start}" if self.split.start else ""
        more = f" and {len(others)} more" if others else ""
        return f"{first.path}{start}{more}"

    @property
    def position(self) -> tuple[str, int]:
        """The path of its first file, and from where it is read."""
        return os.path.realpath(self.split.files[0].path), self.split.start

    def load(self) -> None:
        """Called before processes for such tasks are forked."""
        load_for_forks(self.stages)

    def records(self, split: InputSplit) -> Iterator[Record]:
        """Yield the documents of the split, which has its listed files on this machine."""
        return read_source(self.source, split) if self.source is not None else read_split(split, self.read)


def task_key(content: str, format: str, stages: Sequence[Stage], dedup: Dedup | None) -> str:
    """The `recipe_key` of a TextTask; `content` is its `content_key`."""
    return hash_json([TEXT_VERSION, versions([format], stages), content, dedup.signature() if dedup else {}])


@dataclass(frozen=True)
class TextResult:
    """The result of a TextTask. `places` is how many lines, rows or records it read; bytes are UTF-8 of text.

    `key` is `random_key`'s, "" until all files are hashed. `sha256s` and `failed` are by the number of the split's
    source: hashes of the files that begin in it; and why nothing, or not all, could be read of one, with the bytes
    of it that are missing and the records that are malformed for that reason. `hits` counts what stages found.
    """

    name: str
    key: str
    documents_in: int
    documents_out: int
    malformed: int
    places: int
    bytes_out: int
    sha256s: dict[str, str]
    failed: dict[str, tuple[str, int, int]]
    hits: int
    signed: Signed | None
    bytes_in: int  # Of the text that was read.
    counts: TaskCounts | None = None  # Of the call that ran it, for the record of its progress; not kept.

    @property
    def prefix(self) -> str:
        """Of the names of its objects."""
        return f"tasks/{self.name}"

    @property
    def part(self) -> TextPart:
        """The input of later tasks."""
        return TextPart(f"{self.prefix}.arrow", self.documents_out, self.key)

    @property
    def stats(self) -> str:
        """The name of its statistics."""
        return f"{self.prefix}.stats"


def conclude_task(
    store: Store,
    split: InputSplit,
    stats: StageStats,
    rejects: list[Reject],
    result: TextResult,
    earlier: TextResult | None = None,
) -> TextResult:
    """Write the statistics of a result, which is returned with its counts, and its rejects and hits.

    Those of an `earlier` task over the same split come first.
    """
    for ending, before, lines in (
        ("rejects", earlier and earlier.malformed, rejects), ("hits", earlier and earlier.hits, stats.hits),
    ):  # fmt: skip
        if before or lines:
            data = store.read(f"{earlier.prefix}.{ending}") if earlier and before else b""
            store.write(f"{result.prefix}.{ending}", [data, *map(json_line, lines)])
    write_stats(store, result.stats, stats)
    first = [
        {"where": describe_position(split, reject["place"], reject["where"]), "reason": reject["reason"]}
        for reject in rejects[:MAX_LISTED]
    ]
    return replace(result, counts=TaskCounts.of(stats, first))


def write_records(
    store: Store, name: str, splits: Sequence[InputSplit], texts: Sequence[TextResult], work: Store, ending: str
) -> list[Json]:
    """Write the `rejects` or `hits` of all splits, a JSON line each with `where` as a position; returns three.

    Rejects are malformed records, with `reason` and the first of the text; hits are what stages found in documents. No
    object is left if there is nothing.
    """
    first: list[Json] = []
    counts = [text.malformed if ending == "rejects" else text.hits for text in texts]

    def lines() -> Iterator[bytes]:
        for split, text, count, first_row in zip(splits, texts, counts, first_rows(splits, (t.places for t in texts))):
            for line in work.read(f"{text.prefix}.{ending}").splitlines() if count else ():
                entry = json.loads(line)
                location = describe_position(split, entry.pop("place"), entry.pop("where"), first_row)
                entry = {"where": location, **entry}
                if len(first) < 3:
                    first.append(entry)
                yield json_line(entry)
            if ending == "rejects" and count > MAX_REJECTS:
                more = f"{count - MAX_REJECTS} more"
                yield json_line({"where": split.files[0].path, "reason": more, "text": ""})

    if any(counts):
        store.write(name, lines())
    else:
        store.remove([name])
    return first


def process_split(task: TextTask, scale: int) -> TextResult:
    """Read the split, run the stages over its documents, and sign what is kept."""
    with downloaded(task.split, task.store) as split:
        return _process(task, split, scale)


def _process(task: TextTask, split: InputSplit, scale: int) -> TextResult:
    stats, started = StageStats(), work_time()
    reader = _Reader(task, split, BATCH_BYTES >> (2 * scale), *_readable(task, split, scale))
    with open_documents(task.store, f"tasks/{task.name}", task.dedup) as out:
        for batch in reader.batches(stats):
            for kept_rows in run_stages(task, batch, stats, reader):
                out.add(kept_rows)
                del kept_rows
            del batch
            tick()
    sources = enumerate(split.files if task.hashes and task.split.start == 0 else ())
    sha256s = {str(index): sha256 for index, source in sources if (sha256 := hash_source(source))}
    stats.usage.count("dedup", out.signing_s)
    stats.usage.count("read", work_time() - started - reader.counted_s - out.signing_s)
    for source in split.files:
        check_unchanged(source)  # since it was read
    result = TextResult(
        task.name, "", reader.documents, out.documents, reader.malformed, reader.num_places, out.bytes, sha256s,
        reader.failed, len(stats.hits), out.signed, stats.stage("read").bytes_in,
    )  # fmt: skip
    return conclude_task(task.store, task.split, stats, reader.rejects, result)


def _readable(task: TextTask, split: InputSplit, scale: int) -> tuple[int, str]:
    """How many records can be read, and why no more; -1 if all.

    A fork reads first where an attempt has died already; and what Parquet's library may abort over, its metadata.
    """

    def read_all() -> None:
        for number, _ in enumerate(task.records(split), 1):
            set_activity(str(number))

    if any("://" in source.path for source in split.files):
        return -1, ""  # what fetches them has threads, which a fork does not
    if scale:
        end, activity = run_in_fork(read_all)
    elif task.split.format == "parquet":
        end, activity = run_in_fork(lambda: read_metadata(task.split))
    else:
        return -1, ""
    return (int(activity or 0), f"reading {end}: the rest is left out") if end else (-1, "")


class _Reader(Rejects):
    def __init__(self, task: TextTask, split: InputSplit, batch_bytes: int, stop: int, reason: str) -> None:
        super().__init__(split)
        self._trace = ReadTrace()
        self._split = replace(split, files=tuple(replace(file, trace=self._trace) for file in split.files))
        self._stop, self._reason = stop, reason
        self._task = task
        self._batch_bytes = batch_bytes
        self.documents = self.num_places = self.num_texts = 0
        self.failed: dict[str, tuple[str, int, int]] = {}

    def batches(self, stats: StageStats) -> Iterator[pa.RecordBatch]:
        count = stats.stage("read")
        pending: list[Record] = []
        size, started = 0, work_time()
        for record in self._records():
            if not _imported:  # what reads the format, of which a small sample should not pay a share
                _imported.append(True)
                pa.array([""])  # The first one imports pandas, if there is one.
                self.counted_s += (importing_s := work_time() - started)
                stats.usage.count("start", importing_s)
            self.num_places = max(self.num_places, record.index + 1)
            if record.problem == "blank" or not (self._is_sampled(record.index) or record.unread or record.failed):
                continue
            if record.missing and record.failed:  # its records count as empty
                self._count_unread(record)
                continue
            self.documents += 1
            count.documents_in += 1
            if record.problem:
                count.dropped["malformed"] += 1
                text = record.text[:REJECT_CHARACTERS]
                self.reject([{"place": record.index, "where": record.location, "reason": record.problem, "text": text}])
                self._count_unread(record)
                continue
            if not record.text or record.text.isspace():
                count.dropped["empty"] += 1
                continue
            pending.append(record)
            self.num_texts += 1
            size += len(record.text)
            if size >= self._batch_bytes or len(pending) >= BATCH_ROWS:
                batch = self._counted(pending, stats)
                pending, size = [], 0
                del record  # a giant must not be here and in the batch while the stages have it
                yield batch
                del batch
        if pending:
            yield self._counted(pending, stats)
        if not self.failed and (damage := self._trace.damage(self._split)):
            missing = 0 if "ends early" in damage else self._trace.unread_bytes(self._split)
            self.failed["0"] = damage, missing, 1
        if self.documents == self.malformed and self.documents and not self.failed:
            reason = f"none of {self.documents:,} records is a document, the first: {self.rejects[0]['reason']}"
            self.failed["0"] = reason, self._task.split.bytes, self.malformed

    def _count_unread(self, record: Record) -> None:
        """Count what is not read of a file because of a malformed record."""
        files, index = self._task.split.files, 0
        if (
            self._task.source is None and text_format(self._task.split.format).is_grouped
        ):  # whose files are a document each
            index, unread = record.index, files[record.index].bytes
        elif record.failed or record.unread < 0:
            unread = self._trace.unread_bytes(self._split) if self.num_texts else self._task.split.bytes
        else:
            unread = record.unread
        if unread or record.failed or record.is_cut:
            reason, before, records = self.failed.get(str(index), (record.problem, 0, 0))
            self.failed[str(index)] = reason, before + unread, records + (not record.missing)

    def _records(self) -> Iterator[Record]:
        if self._stop < 0:
            yield from self._task.records(self._split)
            return
        index = -1
        for record in islice(self._task.records(self._split), self._stop):
            index = record.index
            yield record
        yield Record(index + 1, problem=self._reason, unread=-1)

    def _counted(self, records: list[Record], stats: StageStats) -> pa.RecordBatch:
        batch = to_batch(records, self._task.read)
        sizes = text_bytes(batch)
        count = stats.stage("read")
        count.documents_out += batch.num_rows
        count.bytes_in += int(sizes.sum())
        count.bytes_out += int(sizes.sum())
        columns = batch.select([n for n in self._task.read.columns if n in batch.schema.names])
        stats.add_batch("read", columns.append_column("text_bytes", pa.array(sizes)))
        return batch

    def _is_sampled(self, index: int) -> bool:
        if self._task.sample >= 1:
            return True
        key = int(mix64(np.array([index], np.uint64), self.seed)[0])
        return key < self._task.sample * 2**64


class DocumentWriter:
    """Writes the documents that a task keeps, and signs them; `documents` and `bytes` (UTF-8) are those so far."""

    def __init__(self, file: BinaryIO, signer: "Signer | None") -> None:
        self.documents = self.bytes = 0
        self.signing_s = 0.0  # CPU seconds
        self._file, self._signer = file, signer
        self._writer: Any = None
        self.signed: Signed | None = None  # Once it is closed.

    def add(self, batch: pa.RecordBatch) -> None:
        """Write the next documents; all batches that are not empty have one schema."""
        if batch.num_rows:
            self.documents += batch.num_rows
            self.bytes += int(text_bytes(batch).sum())
            if self._signer is not None:
                started = work_time()
                self._signer.add(batch)
                self.signing_s += work_time() - started
            self.writer(batch.schema).write_batch(batch)

    def writer(self, schema: pa.Schema) -> Any:
        """The writer of the file, whose schema is that of the first batch."""
        self._writer = self._writer or pa.ipc.new_file(self._file, schema, options=_ARROW_OPTIONS)
        return self._writer


@contextmanager
def open_documents(store: Store, prefix: str, dedup: Dedup | None) -> Iterator[DocumentWriter]:
    """A writer of `PREFIX.arrow`, which appears once it is complete, and of its signatures for `dedup`."""
    with ExitStack() as stack:
        file, signer = stack.enter_context(store.open(f"{prefix}.arrow")), None
        if dedup is not None:
            from forebay.prepare.dedup.deduplicate import Signer  # which needs numba

            signer = stack.enter_context(Signer(store, prefix, dedup))
        writer = DocumentWriter(file, signer)
        yield writer
        writer.writer(SCHEMA).close()
    writer.signed = signer.signed if signer is not None else None
