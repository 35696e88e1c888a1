"""Raw text to datasets: the tasks in their order, and what they add up to.

Hides: the working directory `OUT/.work`, in which finished tasks outlive a killed run, and which task feeds which:

    TEXT (read, clean, filter, sign) → TRIM (percentiles) → DEDUP → ENCODE → SHUFFLE → SLICE → manifest, report

The same inputs and recipe give the same bytes for any number of workers, any engine and any number of interruptions.
Needs room for the kept text once (LZ4) and the tokens twice, three times if documents are shuffled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forebay.dataset.manifest import DOCUMENTS_FILE, MANIFEST_FILE
from forebay.dataset.reader import open_dataset
from forebay.errors import PrepareError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.prepare.corpus import Corpus, nothing_left, read_skipped, write_empty_report, write_skipped
from forebay.prepare.documents import OWN_COLUMNS
from forebay.prepare.engines.base import Engine, open_engine
from forebay.prepare.engines.local import cores
from forebay.prepare.outputs.dataset import finish
from forebay.prepare.outputs.text import TEXT_FILE, finish_text
from forebay.prepare.plan import sampled
from forebay.prepare.read import Found, Piece, Skipped, Source, cut, find_sources, read
from forebay.prepare.read.listing import count_reasons, describe_skipped, shown_path
from forebay.prepare.read.opening import check_unchanged
from forebay.prepare.recipe import Recipe, load_recipe
from forebay.prepare.stats import PERPLEXITY, Tally, percentile_threshold
from forebay.prepare.tasks.encode import Encoded, sample_texts
from forebay.prepare.tasks.text import (
    TextResult,
    TextTask,
    TrimTask,
    content_key,
    finished_text,
    hash_source,
    identity,
    random_key,
    sift,
    stage_files,
    task_key,
    trim,
    versions,
    write_rejects,
)
from forebay.prepare.tokenize.tokenizers import TokenizerFile, load_tokenizer, train_tokenizer, vocab_to_train

if TYPE_CHECKING:
    from forebay.prepare.dedup.corpus import DedupResult

T = TypeVar("T")
R = TypeVar("R")
REJECTS_FILE = "rejects.jsonl"
INDEX_FILE = ".inputs.json"


@dataclass(frozen=True)
class Progress:
    """How far one stage has come. `text` counts bytes of input, and documents read and kept; others their own units."""

    stage: str
    done: int
    total: int
    unit: str
    documents: int = 0
    kept: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class PrepareSummary:
    """What came of it; `subsets` are datasets of their own. `already_there` if the directory held this one before.

    `skipped` counts the inputs that were left out or could not be read, by reason; `skipped.jsonl` names them.
    """

    dataset: str
    id: str
    documents_in: int
    documents_out: int
    tokens: int
    slices: int
    dropped: dict[str, int] = field(default_factory=dict)
    subsets: dict[str, dict[str, Any]] = field(default_factory=dict)
    already_there: bool = False
    skipped: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `forebay prepare --json` prints: the same for the same inputs and recipe."""
        names = ("dataset", "id", "documents_in", "documents_out", "tokens", "slices", "dropped", "skipped")
        found = {name: getattr(self, name) for name in names}
        return {**found, "subsets": self.subsets} if self.subsets else found


@dataclass(frozen=True)
class Run:
    """One call of `prepare`: what is made, where, by which engine."""

    out: Path
    recipe: Recipe
    engine: Engine
    keep_ids: Path | None
    to: str
    report: Callable[[Progress], None]
    document_ids: bool = False
    note: Callable[[str], None] = lambda message: None

    @property
    def work(self) -> Path:
        """What only an unfinished run needs."""
        return self.out / ".work"

    @property
    def tasks(self) -> Path:
        """Where tasks leave their output."""
        return self.work / "tasks"

    def counted(self, stage: str, total: int, unit: str) -> Callable[[int, object], None]:
        """What reports each result of a `map` as one more of `total`."""
        done = itertools.count(1)
        return lambda *_: self.report(Progress(stage, next(done), total, unit))

    def counted_documents(self, stage: str, sizes: Sequence[int]) -> Callable[[int, TextResult | Encoded], None]:
        """What reports each result of a `map` by the bytes of its task, and documents read and kept so far."""
        done = documents = kept = 0

        def note(index: int, result: TextResult | Encoded) -> None:
            nonlocal done, documents, kept
            done += sizes[index]
            documents += result.documents_in
            kept += result.documents_out
            self.report(Progress(stage, done, sum(sizes), "B", documents, kept, done))

        self.report(Progress(stage, 0, sum(sizes), "B"))
        return note

    def map(
        self,
        run: Callable[[T, int], R],
        tasks: Sequence[T],
        finished: Callable[[T], R | None] = lambda _: None,
        note: Callable[[int, R], None] = lambda *_: None,
        weights: Sequence[int] | None = None,
    ) -> list[R]:
        """The results in the order of the tasks; what is finished is not run, and tasks of one name run once."""
        results: list[R | None] = [finished(task) for task in tasks]
        first: dict[str, int] = {}
        for index, task in enumerate(tasks):
            if (result := results[index]) is not None:
                note(index, result)
            else:
                first.setdefault(str(getattr(task, "name", index)), index)
        todo = list(first.values())

        def done(position: int, result: R) -> None:
            results[todo[position]] = result
            note(todo[position], result)

        heavy = [weights[index] for index in todo] if weights is not None else None
        self.engine.map(run, [tasks[index] for index in todo], done, heavy)
        found: list[R] = []
        for index, task in enumerate(tasks):
            result = results[index]
            if result is None:
                result = results[first[str(getattr(task, "name", index))]]
                assert result is not None
                note(index, result)
            found.append(result)
        return found


def prepare(
    inputs: Sequence[str | Path],
    out: Path | str,
    *,
    recipe: Recipe | None = None,
    tokenizer: str | None = None,
    name: str | None = None,
    slice_bytes: int | None = None,
    workers: int | None = None,
    seed: int | None = None,
    keep_ids: Path | None = None,
    document_ids: bool = False,
    text_key: str | None = None,
    max_bad_fraction: float | None = None,
    to: str = "dataset",
    follow_links: bool = False,
    strict: bool = False,
    engine: str | Engine = "local",
    on_progress: Callable[[Progress], None] | None = None,
    on_trouble: Callable[[str], None] | None = None,
) -> PrepareSummary:
    """Make a dataset of raw text; run again after a crash, it goes on where it was.

    Args:
        inputs: Files, directories and URLs of any format of `forebay.prepare.read.FORMATS`.
        out: The dataset's directory; made if need be. Named subsets are datasets in directories below it.
        recipe: What to do with the text; without one it is tokenized as it is. The other settings change it.
        tokenizer, name, slice_bytes, seed, text_key, max_bad_fraction: As in the recipe.
        workers: Processes; by default one a core (of all the cluster's, with Ray). The bytes do not depend on it.
        keep_ids: If given, the source id of each kept document goes here, one a line, in the order of the input: its
            `id` in the input, else `path:line` (or row), or the path of a text file.
        document_ids: Keep the source id and file of each document beside the slices, in `documents.parquet`, in the
            order of the dataset: from a step of training back to the document, and from a document to who saw it. The
            slices are the same; the manifest, and so the dataset's id, is another.
        to: `dataset`; or `text`: Parquet files of what is kept, in `out/text`, for which no tokenizer is needed. (It is
            tokenized, shuffled and divided into subsets by another `prepare` of that folder.)
        follow_links: Also read what links in input folders lead to elsewhere.
        strict: An input that would be left out, or that cannot be read, is an error.
        engine: `local` (processes of this machine), `ray`, a plug-in's name, or an engine.
        on_progress, on_trouble: Called in this thread; trouble is a worker that died and is tried again, and a line
            for each reason why inputs are left out.

    Raises:
        UsageError: If a setting cannot be, or `out` holds another dataset or is in use.
        PrepareError: If an input is missing, changes while it is read or is damaged beyond `max_bad`, there is no
            document (then the report and `skipped.jsonl` are there all the same), or the disk is full.
    """
    out = Path(out)
    whole = _with_settings(
        recipe or load_recipe(),
        out,
        {
            "name": name, "max_bad": max_bad_fraction, "read.text_key": text_key, "tokenize.tokenizer": tokenizer,
            "slice.bytes": slice_bytes, "slice.seed": seed,
        },
    )  # fmt: skip
    if workers is not None and workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}.")
    whole, against = _find_against(_for_output(whole, to))
    if document_ids and (whole.rows is not None or to == "text"):
        raise UsageError("document ids: expected a dataset of tokens; rows and text keep theirs by --keep-ids.")
    vocab = vocab_to_train(whole.tokenize.tokenizer)
    known = _load_tokenizer(whole) if vocab is None else None
    trouble = on_trouble or (lambda message: None)
    found = find_sources(
        inputs or whole.inputs, whole.read, workers=workers or cores(), leave_out=out, follow_links=follow_links
    )
    for line in describe_skipped(found.skipped):
        trouble(line)
    if strict:
        _refuse_skipped(found.skipped)
    with _errors(out), _locked(out), open_engine(engine, workers, out, trouble) as made:
        if keep_ids is not None:  # now, not when all the work is done
            Path(keep_ids).parent.mkdir(parents=True, exist_ok=True)
            remove_stale(Path(keep_ids).parent)
        run = Run(out, whole, made, keep_ids, to, on_progress or (lambda progress: None), document_ids, trouble)
        lineage = _lineage(run, found, known, against)
        done = _already_there(run, found, lineage)
        if done is None:
            write_skipped(run.out, found.skipped)
            return _make(run, found, known, vocab or 0, lineage, strict)
        shutil.rmtree(run.work, ignore_errors=True)
        return dataclasses.replace(done, skipped=count_reasons(read_skipped(run.out)))


def _refuse_skipped(skipped: Sequence[Skipped]) -> None:
    if skipped:
        first = "; ".join(f"{shown_path(one.path)}: {one.reason.rstrip('.')}" for one in skipped[:3])
        raise PrepareError(
            f"prepare --strict: expected to read all inputs, got {len(skipped)} that cannot be read: {first}. Remove "
            "them from the input, or leave out --strict."
        )


def _with_settings(recipe: Recipe, out: Path, settings: dict[str, Any]) -> Recipe:
    """The recipe with single settings changed; the dataset's name is the directory's if there is none."""
    for key, value in settings.items():
        if value is None:
            continue
        table, _, last = key.rpartition(".")
        if table:
            value = dataclasses.replace(getattr(recipe, table), **{last: value})
        recipe = dataclasses.replace(recipe, **{table or last: value})
    score, read = recipe.dedup.score, recipe.read
    if (
        score
        and score not in {*OWN_COLUMNS, *read.columns}
        and all(type(stage).__module__.startswith("forebay.") for stage in recipe.stages)
    ):  # No stage makes it, so it is a field of the input.
        read = dataclasses.replace(read, columns={**read.columns, score: "number"})
        recipe = dataclasses.replace(recipe, read=read)
    return recipe if recipe.name else dataclasses.replace(recipe, name=out.resolve().name or "dataset")


def _for_output(recipe: Recipe, to: str) -> Recipe:
    """The recipe with a tokenizer, which text does not need; UsageError if it has none."""
    if to not in ("dataset", "text"):
        raise UsageError(f"to: expected dataset or text, got {to!r}.")
    if to == "text":
        return dataclasses.replace(recipe, tokenize=dataclasses.replace(recipe.tokenize, tokenizer="bytes"))
    if not recipe.tokenize.tokenizer:
        raise UsageError(
            "prepare: expected a tokenizer (--tokenizer or [tokenize] tokenizer): a tokenizer.json, a hub name, "
            "`bytes`, `train:VOCAB` or `tiktoken:NAME`; got none."
        )
    return recipe


def _find_against(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with the folders of signatures that it compares against, and a hash of what is in each."""
    if not recipe.dedup.against:
        return recipe, []

    from forebay.prepare.dedup.corpus import find_stored

    found = [find_stored(path, recipe.dedup) for path in recipe.dedup.against]
    dedup = dataclasses.replace(recipe.dedup, against=tuple(folder for folder, _ in found))
    return dataclasses.replace(recipe, dedup=dedup), [sha256 for _, sha256 in found]


def _load_tokenizer(recipe: Recipe, spec: str = "") -> TokenizerFile:
    policy = recipe.tokenize
    return load_tokenizer(spec or policy.tokenizer, eos=policy.eos, bos=policy.bos)


def _lineage(run: Run, found: Found, known: TokenizerFile | None, against: Sequence[str]) -> dict[str, Any]:
    recipe = run.recipe.to_json()
    name = recipe.pop("name")
    assert name
    recipe["dedup"]["against"] = list(against)  # what is there, not where
    recipe["tokenize"]["tokenizer"] = known.description if known else run.recipe.tokenize.tokenizer
    recipe["tokenize"]["sha256"] = known.sha256 if known else None
    return {
        "inputs": [{"name": s.name, "bytes": s.bytes, "sha256": s.sha256, "format": s.format} for s in found.sources],
        "recipe": recipe,
        "models": [sha256 for _, sha256 in stage_files(run.recipe.stages)],
        "versions": versions({s.format for s in found.sources}, run.recipe.stages),
    }


@contextmanager
def _errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PrepareError(
                f"{out}: no space left on the device. Finished work is kept: make room (the text and three times the "
                "tokens), then run the same command again."
            ) from error
        raise PrepareError(f"{error.filename or out}: cannot write the dataset: {error.strerror or error}.") from error


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    if out.exists() and not out.is_dir():
        raise UsageError(f"prepare: expected --out to be a directory, got {out}, which is a file.")
    out.mkdir(parents=True, exist_ok=True)
    # On the directory itself: a lock file would have to be left or be removed while another waits for it.
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"prepare: another prepare writes to {out}. Wait for it, or choose another.") from error
        yield
    finally:
        os.close(descriptor)


def _with_hashes(run: Run, found: Found, lineage: dict[str, Any], sha256s: Mapping[str, str]) -> dict[str, Any]:
    """The lineage with the hash of each input's content; what is not among `sha256s` yet is hashed by the engine.

    What is learnt is kept in the output, by what tells a file from others, so that no run reads a file for that again.
    """
    path = run.out / INDEX_FILE
    names = {source.path: identity(source) for source in found.sources if "://" not in source.path}
    try:
        before = json.loads(path.read_bytes())
    except (OSError, ValueError):
        before = {}
    index = {name: str(before[name]) for name in names.values() if name in before}
    index |= {names[path]: sha256 for path, sha256 in sha256s.items() if path in names}
    missing = [source for source in found.sources if names.get(source.path, "") not in {"", *index}]
    hashed = run.map(_hash_task, missing, weights=[source.bytes for source in missing])
    index |= {names[source.path]: sha256 for source, sha256 in zip(missing, hashed)}
    if index != before:
        with contextlib.suppress(OSError):  # A finished dataset may be read-only.
            atomic_write(path, json.dumps(index, sort_keys=True).encode())
    inputs = [
        {**entry, "sha256": index[names[source.path]] if source.path in names else entry["sha256"]}
        for source, entry in zip(found.sources, lineage["inputs"])
    ]
    return {**lineage, "inputs": inputs}


def _hash_task(source: Source, scale: int) -> str:
    check_unchanged(source)
    found = hash_source(source)
    check_unchanged(source)
    return found


def _is_same(run: Run, found: Found, theirs: Mapping[str, Any], lineage: dict[str, Any]) -> bool:
    """Whether a lineage is that of this run: names and sizes are compared before any file is read."""
    ours = [{**entry, "sha256": ""} for entry in lineage["inputs"]]
    if [{**entry, "sha256": ""} for entry in theirs.get("inputs", ())] != ours:
        return False
    if any(theirs.get(key) != lineage[key] for key in ("recipe", "models")):
        return False
    if theirs["inputs"] != _with_hashes(run, found, lineage, {})["inputs"]:
        return False
    before = {key: value for key, value in theirs.get("versions", {}).items() if lineage["versions"].get(key) != value}
    if before:
        old, new = ({k: v.get(k, "none") for k in before} for v in (theirs["versions"], lineage["versions"]))
        changes = ", ".join(f"{name} {old[name]} (here: {new[name]})" for name in before)
        run.note(f"{run.out}: was made with other versions: {changes}. It is kept; remove it to make it anew.")
    return True


def _already_there(run: Run, found: Found, lineage: dict[str, Any]) -> PrepareSummary | None:
    if (run.out / TEXT_FILE).exists():
        return _text_already_there(run, found, lineage)
    if not (run.out / MANIFEST_FILE).exists():
        if (run.out / "slices").exists() and not run.work.exists():
            raise UsageError(f"prepare: {run.out / 'slices'} is not from an unfinished run. Choose another directory.")
        return None
    dataset = open_dataset(run.out)
    theirs = dataset.manifest.lineage
    same = (DOCUMENTS_FILE in theirs.get("files", {})) == run.document_ids and _is_same(run, found, theirs, lineage)
    if not same or dataset.name != run.recipe.name or (run.keep_ids is not None and not run.keep_ids.exists()):
        raise UsageError(
            f"prepare: expected an empty directory, got {run.out}, which holds dataset {dataset.name!r} "
            f"({dataset.id[:12]}…). A dataset never changes: choose another directory, or remove this one."
        )
    m = dataset.manifest
    counts = theirs["counts"]
    return PrepareSummary(
        m.name, dataset.id, counts["documents_in"], counts["documents_out"], counts["tokens"], counts["slices"],
        counts["dropped"], counts["subsets"], True,
    )  # fmt: skip


def _text_already_there(run: Run, found: Found, lineage: dict[str, Any]) -> PrepareSummary:
    data = (run.out / TEXT_FILE).read_bytes()
    try:
        facts = json.loads(data)
        theirs, name = facts["lineage"], facts["name"]
    except (ValueError, KeyError, TypeError) as error:
        raise PrepareError(f"{run.out / TEXT_FILE}: damaged. Choose another directory, or remove this one.") from error
    if run.to != "text" or name != run.recipe.name or not _is_same(run, found, theirs, lineage):
        raise UsageError(
            f"prepare: expected an empty directory, got {run.out}, which holds other prepared text. Choose another "
            "directory, or remove this one."
        )
    return PrepareSummary(name, hashlib.sha256(data).hexdigest(), **theirs["counts"], already_there=True)


def _make(
    run: Run, found: Found, known: TokenizerFile | None, vocab: int, lineage: dict[str, Any], strict: bool
) -> PrepareSummary:
    run.tasks.mkdir(parents=True, exist_ok=True)
    remove_stale(run.out)
    remove_stale(run.tasks)
    pieces, sample = sampled(cut(found.sources, run.recipe.read), run.recipe.sample)
    content = content_key(run.recipe.read, run.recipe.stages, stage_files(run.recipe.stages), sample)
    texts = _texts(run, pieces, sample, content)
    failed = _failed(pieces, texts)
    found = dataclasses.replace(found, skipped=(*found.skipped, *failed))
    write_skipped(run.out, found.skipped)
    for line in describe_skipped(failed):
        run.note(line)
    if strict:
        _refuse_skipped(failed)
    tally = Tally()
    for result in texts:
        tally.add(result.tally(str(run.tasks)))
    _check(run, Corpus(found, pieces, texts, None, str(run.tasks)), tally)
    sha256s = {
        piece.sources[int(index)].path: sha256
        for piece, text in zip(pieces, texts)
        for index, sha256 in text.sha256s.items()
    }
    lineage = _with_hashes(run, found, lineage, sha256s)
    sha256s = {source.path: entry["sha256"] for source, entry in zip(found.sources, lineage["inputs"])}
    texts = [dataclasses.replace(t, key=random_key(content, piece, sha256s)) for piece, t in zip(pieces, texts)]
    texts = _trimmed(run, texts, tally)
    corpus = Corpus(found, pieces, texts, _deduplicated(run, texts), str(run.tasks))
    if run.to == "text":
        return finish_text(run, corpus, tally, lineage)
    used = known or _trained(run, texts, vocab)
    return finish(run, corpus, used, tally, lineage)


def _failed(pieces: Sequence[Piece], texts: Sequence[TextResult]) -> list[Skipped]:
    """The files of which nothing could be read, each with the first reason."""
    failed: dict[str, str] = {}
    for piece, text in zip(pieces, texts):
        for index, reason in text.failed.items():
            path = piece.sources[int(index)].path
            failed.setdefault(path, reason.removeprefix(f"{path}: "))
    return [Skipped(path, reason, "failed") for path, reason in failed.items()]


def _texts(run: Run, pieces: Sequence[Piece], sample: float, content: str) -> list[TextResult]:
    recipe = run.recipe
    sign = recipe.dedup.active and not recipe.percentiles
    formats = {piece.format for piece in pieces}
    keys = {format: task_key(content, format, recipe.stages, recipe.dedup, sign) for format in formats}
    tasks = [
        TextTask(
            piece,
            recipe.read,
            recipe.stages,
            recipe.dedup,
            sign,
            sample,
            str(run.tasks),
            keys[piece.format],
            recipe.limits,
        )
        for piece in pieces
    ]
    sizes = [piece.bytes for piece in pieces]
    return run.map(sift, tasks, finished_text, run.counted_documents("text", sizes), sizes)


def _check(run: Run, corpus: Corpus, tally: Tally) -> None:
    """Write rejects.jsonl; stop, with a report, if there are too many, or nothing is left."""
    path, texts = run.out / REJECTS_FILE, corpus.texts
    first = write_rejects(path, corpus.pieces, texts, str(run.tasks))
    malformed = sum(result.malformed for result in texts)
    if malformed > run.recipe.max_bad * corpus.documents_in:
        write_empty_report(run, corpus, tally)
        told = "; ".join(f"{r['where']}: {r['reason'].rstrip('.')}" for r in first)
        raise PrepareError(
            f"prepare: expected at most {run.recipe.max_bad:.1%} malformed documents, got {malformed} of "
            f"{corpus.documents_in}: {told}. They are listed in {path}. Mend them, or raise --max-bad."
        )
    if not sum(result.documents_out for result in texts):
        raise nothing_left(run, corpus, tally)


def _trimmed(run: Run, texts: list[TextResult], tally: Tally) -> list[TextResult]:
    """Documents outside a perplexity percentile go out; what is counted on the way goes into `tally`."""
    seen = tally.histograms.get(PERPLEXITY, {}).get("read")
    if not run.recipe.percentiles or seen is None:
        return texts
    low, high = (percentile_threshold(seen, percentile) for percentile in run.recipe.percentiles)
    folder = str(run.tasks)
    tasks = [
        TrimTask(result.part(folder), result, low, high, run.recipe.dedup, run.recipe.dedup.active, folder)
        for result in texts
    ]
    trimmed = run.map(trim, tasks)
    for result in trimmed:
        tally.add(result.tally(folder))
    return trimmed


def _deduplicated(run: Run, texts: Sequence[TextResult]) -> DedupResult | None:
    dedup = run.recipe.dedup
    if not dedup.active:
        return None

    from forebay.prepare.dedup.corpus import Part, deduplicate

    def step(what: str, done: int, total: int) -> None:
        run.report(Progress("dedup", done, total, " steps"))

    parts = [Part(f"{run.tasks}/{result.name}", result.documents_out) for result in texts]
    return deduplicate(parts, dedup, run.work / "dedup", lambda f, tasks: run.map(f, tasks), step)


def _trained(run: Run, texts: Sequence[TextResult], vocab: int) -> TokenizerFile:
    """The tokenizer learnt from a sample of the kept text; of an earlier run if there is one."""
    seed = run.recipe.slice.seed
    parts = [result.part(str(run.tasks)) for result in texts]
    facts = json.dumps([vocab, seed, version("tokenizers"), [part.name for part in parts]])
    folder = run.work / f"trained-{hashlib.sha256(facts.encode()).hexdigest()[:32]}"
    path = folder / "tokenizer.json"
    spec = run.recipe.tokenize.tokenizer
    if not path.exists():
        folder.mkdir(exist_ok=True)
        run.report(Progress("tokenizer", 0, 1, " trained"))
        atomic_write(path, train_tokenizer(sample_texts(parts, seed), vocab).data)
        run.report(Progress("tokenizer", 1, 1, " trained"))
    return dataclasses.replace(_load_tokenizer(run.recipe, str(path)), description=spec)


def texts_of(inputs: Sequence[str | Path], recipe: Recipe) -> Iterator[str]:
    """Every text of the inputs, in order, unfiltered: for what learns from raw text."""
    found = find_sources(inputs, recipe.read)
    for piece in cut(found.sources, recipe.read):
        for record in read(piece, recipe.read):
            if not record.problem and record.text:
                yield record.text
