"""`prepare_dataset`: raw text to a dataset. The tasks in their order, and the checks around them.

    TEXT (read, clean, filter, sign) → PERCENTILE → DEDUP → the output: ENCODE → SHUFFLE → SLICE → manifest, report

Finished tasks stay in `OUT/.work` and outlive a killed run. The same inputs and recipe give the same bytes for any
number of workers, any engine and any number of interruptions. Needs disk space for the kept text once (LZ4) and the
tokens twice, three times if documents are shuffled.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.dataset.reader import Dataset
from forebay.errors import ForebayError, PrepareError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.formats.inputs import RESERVED_COLUMNS, InputFile, InputSplit
from forebay.formats.parquet import recorded_columns
from forebay.prepare.compiled import has_compiled
from forebay.prepare.config import apply_settings, load_recipe
from forebay.prepare.corpus import Corpus, read_skipped, write_skipped
from forebay.prepare.dedup.methods import Dedup, Method
from forebay.prepare.documents import Stage
from forebay.prepare.engines.base import Engine, open_engine
from forebay.prepare.engines.local import cores
from forebay.prepare.extend import check_extension, is_parents_tokenizer, open_parent, parent_tokenizer, sign_parent
from forebay.prepare.inputs import InputFiles, find_inputs, split_files
from forebay.prepare.lineage import is_same, lineage_of, with_hashes
from forebay.prepare.outputs.base import HITS_FILE, REJECTS_FILE, Output, no_documents, write_empty_report
from forebay.prepare.outputs.dataset import DatasetOutput, ReportOutput
from forebay.prepare.outputs.text import LanguageModelOutput, TextOutput
from forebay.prepare.progress import Progress, ProgressRecord
from forebay.prepare.recipe import Recipe
from forebay.prepare.run import PrepareResult, PrepareRun
from forebay.prepare.sampling import Sampling
from forebay.prepare.scores.base import annotating, segments, without_scoring
from forebay.prepare.sources import DocumentSource, open_source, source_splits
from forebay.prepare.stats import StageStats
from forebay.prepare.tasks import keys
from forebay.prepare.tasks.encode import sample_texts
from forebay.prepare.tasks.percentile import SegmentTask, process_segment, thresholds_of
from forebay.prepare.tasks.stages import stage_names
from forebay.prepare.tasks.text import (
    TextResult,
    TextTask,
    finished_text,
    process_split,
    task_key,
    write_hits,
    write_rejects,
)
from forebay.prepare.tokenize import tokenizers
from forebay.storage.listing import Skipped, count_reasons, describe_skipped, shown_path
from forebay.storage.locks import Lock

if TYPE_CHECKING:
    from forebay.prepare.dedup.deduplicate import DedupResult

OUTPUTS: tuple[Output, ...] = (DatasetOutput(), TextOutput(), LanguageModelOutput(), ReportOutput())
KINDS = ("number", "text")


def prepare_dataset(
    inputs: Sequence[str | Path | DocumentSource],
    out: Path | str,
    *,
    recipe: Recipe | str | None = None,
    tokenizer: str | tokenizers.Tokenizer | None = None,
    filters: Sequence[str | Stage] = (),
    dedup: Sequence[str | Method] = (),
    name: str | None = None,
    slice_bytes: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    to: str | Output = "dataset",
    annotate: bool = False,
    write_ids: Path | None = None,
    document_ids: bool = False,
    extend: Path | str | None = None,
    engine: str | Engine = "local",
    workers: int | None = None,
    follow_links: bool = False,
    strict: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_message: Callable[[str], None] | None = None,
) -> PrepareResult:
    """Prepare a dataset of raw text. A killed call resumes when it is called again.

    Args:
        inputs: Files, directories and URLs of any format of `forebay.formats`; inputs of entry points of
            `forebay.sources`; or objects of the protocol `DocumentSource`, whose documents come last.
        out: The dataset's directory, which is created.
        recipe: What to do with the text: a Recipe, or the name of one that comes with Forebay. Without one the text is
            tokenized as it is. The arguments that follow are laid over it.
        tokenizer: As `[tokenize] tokenizer`, or an object of the protocol `Tokenizer`.
        filters: Stages after those of the recipe: names of stages, of entry points of `forebay.filters`,
            `module:Class`, or objects.
        dedup: Methods besides those of the recipe: the names of `dedup.methods.KINDS`, of entry points of
            `forebay.dedup`, `module:Class`, or objects.
        name, slice_bytes, seed: As in the recipe; the name is by default the directory's.
        settings: Nested tables of a recipe: `{"read": {"text_key": "body"}}`.
        to: `dataset`; `text`: Parquet files of the kept text in `out/text`; `lm`: a language model, `out/model.arpa`;
            `report`: the report alone, in place of an earlier one; or an object of the protocol `Output`.
        annotate: Write the text with its columns and scores, as `to="text"`; stages that would drop documents are left
            out, and so is deduplication.
        write_ids: Write the source id of each kept document here, one a line, in the order of the input: its `id` in
            the input, else `path:line` (or row), or the path of a text file.
        document_ids: Write the source id and file of each document to `documents.parquet`, in the order of the dataset.
            The slices are the same; the manifest, and so the dataset's id, is another.
        extend: A dataset's directory. The new dataset has all its slices first, as hard links, and after them slices of
            these inputs; its manifest names the parent. The tokenizer is by default the parent's. Deduplication
            compares the new documents with the parent's, by the text of their tokens, and refuses what has none.
        engine: `local` (processes of this machine), `ray`, the name of an entry point of `forebay.engines`, or an
            object of the protocol `Engine`.
        workers: Processes; by default one a core (of the whole cluster, with Ray). The bytes do not depend on it.
        follow_links: Read what links in input folders lead to, also outside these folders.
        strict: Fail if an input would be left out, or cannot be read.
        on_progress, on_message: Called in this thread. A message is of a worker that died and is tried again, or a
            reason why inputs are left out.

    Raises:
        UsageError: If a setting is invalid, or `out` holds another dataset or is in use.
        PrepareError: If an input is missing, changes while it is read or is damaged beyond `[read] max_malformed`,
            there is no document (the report and `skipped.jsonl` are written all the same), or the disk is full.
    """
    out = Path(out)
    to = "text" if annotate and to == "dataset" else to
    output = next((output for output in OUTPUTS if output.name == to), to)
    if isinstance(output, str):
        raise UsageError(f"to: expected one of {', '.join(output.name for output in OUTPUTS)}, got {to!r}.")
    arguments: dict[str, Any] = {
        "name": name,
        "tokenize": {"tokenizer": tokenizer if isinstance(tokenizer, str | None) else tokenizer.name},
        "slice": {"bytes": slice_bytes, "seed": seed},
    }
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    recipe = apply_settings(recipe, [settings or {}, arguments], filters, dedup)
    recipe = recipe if recipe.name else dataclasses.replace(recipe, name=out.resolve().name or "dataset")
    if annotate:
        recipe = dataclasses.replace(recipe, stages=annotating(recipe.stages), dedup=Dedup())
    if workers is not None and workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}.")
    progress = ProgressRecord(out, recipe.name, output.name, workers or cores(), on_progress, on_message)
    notify = progress.notify
    parent = open_parent(extend, out) if extend is not None else None
    own = tokenizer if output.needs_tokenizer and not isinstance(tokenizer, str) else None
    recipe, loaded = _open_tokenizer(recipe, own, output, document_ids, parent, notify)
    sources, own_sources = _open_inputs(inputs or recipe.inputs, recipe, workers or cores(), out, follow_links)
    for line in describe_skipped(sources.skipped):
        notify(line)
    if strict:
        _refuse_skipped(sources.skipped)
    with progress.recorded(), _errors(out), _locked(out), open_engine(engine, workers, out, notify) as opened:
        progress.watch(opened)
        if write_ids is not None:  # fail now rather than when all the work is done
            Path(write_ids).parent.mkdir(parents=True, exist_ok=True)
            remove_stale(Path(write_ids).parent)
        own_splits = [(split, item) for item in own_sources for split in source_splits(item)]
        listed = (*sources.files, *(split.files[0] for split, _ in own_splits))
        recipe, recorded = _with_recorded_columns(recipe, sources.files if not own_splits else (), notify)
        sources = dataclasses.replace(sources, files=listed, sample=recipe.sample if own_sources else sources.sample)
        run = PrepareRun(out, recipe, opened, write_ids, document_ids, progress, notify, parent, recorded)
        return _run(run, output, sources, own_splits, loaded, strict)


def _open_tokenizer(
    recipe: Recipe,
    own: tokenizers.Tokenizer | None,
    output: Output,
    document_ids: bool,
    parent: Dataset | None,
    notify: Callable[[str], None],
) -> tuple[Recipe, tokenizers.TokenizerFile | None]:
    """The recipe with the tokenizer that it takes, and that tokenizer, None if the run trains it.

    Raises UsageError for settings that the output, or the dataset that is extended, does not have.
    """
    if output.name == "report" and not recipe.tokenize.tokenizer:
        recipe = _counting_bytes(recipe)
    of_parent = parent is not None and is_parents_tokenizer(parent, recipe.tokenize.tokenizer)
    if parent is not None and of_parent:
        policy = dataclasses.replace(recipe.tokenize, tokenizer=parent.manifest.tokenizer)
        recipe = dataclasses.replace(recipe, tokenize=policy)
    if output.needs_tokenizer and not recipe.tokenize.tokenizer:
        raise UsageError(
            "prepare: expected a tokenizer (--tokenizer or [tokenize] tokenizer): a tokenizer.json, a hub name, "
            "`bytes` or `train:VOCAB`; got none."
        )
    output.check(recipe, document_ids)
    if parent is not None and not isinstance(output, DatasetOutput):
        raise UsageError(f"prepare --extend: expected --to dataset, got {output.name}. Leave out --extend.")
    if not output.needs_tokenizer:
        recipe = _counting_bytes(recipe)
    is_trained = own is None and tokenizers.vocab_to_train(recipe.tokenize.tokenizer) is not None
    try:
        loaded = parent_tokenizer(parent, recipe) if parent is not None and of_parent else None
        if loaded is None and not is_trained:
            loaded = _load_tokenizer(recipe, own)
    except ForebayError as error:
        if output.name != "report":
            raise
        notify(f"{error} Bytes are counted in place of tokens.")
        recipe = _counting_bytes(recipe)
        loaded = _load_tokenizer(recipe)
    if parent is not None:
        check_extension(parent, recipe, loaded, document_ids)
    return recipe, loaded


def _open_inputs(
    inputs: Sequence[str | Path | DocumentSource], recipe: Recipe, workers: int, out: Path, follow_links: bool
) -> tuple[InputFiles, list[DocumentSource]]:
    """The files of the inputs, and the document sources. A run with document sources lists all files."""
    opened = [(source, open_source(source)) for source in inputs]
    own_sources = [own_source for _, own_source in opened if own_source is not None]
    paths = [source for source, own_source in opened if own_source is None and isinstance(source, str | Path)]
    if own_sources and not paths:
        return InputFiles(()), own_sources
    sample = 1.0 if own_sources else recipe.sample
    files = find_inputs(paths, recipe.read, workers=workers, leave_out=out, follow_links=follow_links, sample=sample)
    return files, own_sources


def _with_recorded_columns(
    recipe: Recipe, files: Sequence[InputFile], notify: Callable[[str], None]
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe for input that has columns of an earlier run: it reads them, and does not score again.

    Also what made those scores, by column. All files must have a column, made in the same way.
    """
    columns: dict[str, Any] = {}
    for number, file in enumerate(files):
        recorded = recorded_columns(file) if file.format == "parquet" else {}
        columns = recorded if number == 0 else {n: c for n, c in columns.items() if recorded.get(n) == c}
        if not columns:
            break
    named = recipe.read.columns
    usable = {n: c for n, c in columns.items() if n not in {*named, *RESERVED_COLUMNS} and c.get("kind") in KINDS}
    made_by = {**{name: c.get("scorer") for name, c in usable.items()}, **dict.fromkeys(named)}
    stages, again = without_scoring(recipe.stages, {n: s for n, s in made_by.items() if n in named or s is not None})
    for name in again:
        notify(f"{name}: the input has its columns, made with other settings or another version: it is scored again")
    made_again = {column for stage in stages for column in getattr(stage, "adds", ())}
    kinds = {name: c["kind"] for name, c in usable.items() if name not in made_again}
    if not kinds and stages == recipe.stages:
        return recipe, {}
    read = dataclasses.replace(recipe.read, columns={**named, **kinds})
    recorded = {name: made_by[name] for name in kinds if made_by[name] is not None}
    return dataclasses.replace(recipe, read=read, stages=stages), recorded


def _refuse_skipped(skipped: Sequence[Skipped]) -> None:
    if skipped:
        first = "; ".join(f"{shown_path(item.path)}: {item.reason.rstrip('.')}" for item in skipped[:3])
        raise PrepareError(
            f"prepare --strict: expected to read all inputs, got {len(skipped)} that cannot be read: {first}. Remove "
            "them from the input, or leave out --strict."
        )


def _counting_bytes(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, tokenize=dataclasses.replace(recipe.tokenize, tokenizer="bytes"))


def _load_tokenizer(recipe: Recipe, spec: str | tokenizers.Tokenizer | None = None) -> tokenizers.TokenizerFile:
    policy = recipe.tokenize
    return tokenizers.load_tokenizer(spec or policy.tokenizer, eos=policy.eos, bos=policy.bos)


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
    # The directory itself is locked: a lock file would have to stay, or be removed while another process waits for it.
    with Lock(out, os.open(out, os.O_RDONLY)) as lock:
        try:
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"prepare: another prepare writes to {out}. Wait for it, or choose another.") from error
        yield


def _find_existing(
    run: PrepareRun, output: Output, sources: InputFiles, lineage: dict[str, Any]
) -> PrepareResult | None:
    existing = next(
        (candidate for candidate in {*OUTPUTS, output} if candidate.marker and (run.out / candidate.marker).exists()),
        None,
    )
    if existing is None:
        if (run.out / "slices").exists() and not run.work.exists():
            raise UsageError(f"prepare: {run.out / 'slices'} is not from an unfinished run. Choose another directory.")
        return None
    name, id, theirs = existing.load(run.out)
    same = existing.name == output.name and name == run.recipe.name
    same = same and ("documents.parquet" in theirs.get("files", {})) == run.document_ids
    same = same and (run.write_ids is None or run.write_ids.exists()) and is_same(run, sources, theirs, lineage)
    if not same:
        raise UsageError(
            f"prepare: expected an empty directory, got {run.out}, which holds {existing.name} {name!r} ({id[:12]}…). "
            "A dataset never changes: choose another directory, or remove this one."
        )
    skipped = count_reasons(read_skipped(run.out))
    return PrepareResult(run.out, name, id, **theirs["counts"], already_exists=True, skipped=skipped)


def _failed(splits: Sequence[InputSplit], texts: Sequence[TextResult]) -> list[Skipped]:
    failed: dict[str, str] = {}
    for split, text in zip(splits, texts):
        for index, reason in text.failed.items():
            path = split.files[int(index)].path
            failed.setdefault(path, reason.removeprefix(f"{path}: "))
    return [Skipped(path, reason, "failed") for path, reason in failed.items()]


def _run(
    run: PrepareRun,
    output: Output,
    sources: InputFiles,
    own_splits: Sequence[tuple[InputSplit, DocumentSource]],
    tokenizer: tokenizers.TokenizerFile | None,
    strict: bool,
) -> PrepareResult:
    lineage = lineage_of(run, sources, tokenizer)
    existing = _find_existing(run, output, sources, lineage)
    if existing is not None:
        shutil.rmtree(run.work, ignore_errors=True)
        return existing
    write_skipped(run.out, sources.skipped)
    run.progress.skipped = count_reasons(sources.skipped)
    if (run.recipe.stages or run.recipe.dedup.active) and not has_compiled():
        run.on_message("compiling kernels, once after an installation: half a minute to a minute of CPU time")
    run.tasks.mkdir(parents=True, exist_ok=True)
    remove_stale(run.out)
    remove_stale(run.tasks)
    sizes = len(sources.files), sum(source.bytes for source in sources.files)
    run.progress.start(keys.hash_json([lineage["recipe"], output.name, *sizes]))
    folder = str(run.tasks)
    files = sources.files[: len(sources.files) - len(own_splits)]
    own = {split.files[0].path: source for split, source in own_splits}
    splits = [*split_files(files, run.recipe.read), *(split for split, _ in own_splits)]
    sampling = Sampling.of(splits, sources.sample, sources.scale)
    splits, sample = sampling.splits, sampling.share
    content = keys.content_key(run.recipe.read, run.recipe.stages, keys.stage_files(run.recipe.stages), sample)
    steps = segments(run.recipe.stages)
    texts = _process_splits(run, splits, own, sample, steps, hashes=bool(output.marker))
    failed = _failed(splits, texts)
    sources = dataclasses.replace(sources, skipped=(*sources.skipped, *failed))
    write_skipped(run.out, sources.skipped)
    run.progress.skipped = count_reasons(sources.skipped)
    for line in describe_skipped(failed):
        run.on_message(line)
    if strict:
        _refuse_skipped(failed)
    stats = StageStats()
    sampling.count(texts, folder, stats)
    run.progress.set_counts(stats)
    write_hits(run.out / HITS_FILE, splits, texts, folder)
    _check_malformed(run, Corpus(sources, splits, texts, None, folder, stats, sampling))
    hashed = {
        split.files[int(index)].path: sha256
        for split, text in zip(splits, texts)
        for index, sha256 in text.sha256s.items()
    }
    if output.marker:
        lineage = with_hashes(run, sources, lineage, hashed)
    sha256s = {source.path: entry["sha256"] for source, entry in zip(sources.files, lineage["inputs"])}
    texts = [
        dataclasses.replace(text, key=keys.random_key(content, split, sha256s)) for split, text in zip(splits, texts)
    ]
    texts = _process_segments(run, sampling, texts, stats, steps)
    corpus = Corpus(sources, splits, texts, None, folder, stats, sampling)
    if len(steps) > 1:
        _check_malformed(run, corpus)
    corpus = dataclasses.replace(corpus, dedup=_deduplicated(run, corpus))
    if output.needs_tokenizer and tokenizer is None:
        tokenizer = _trained(run, texts)
    return output.write(run, corpus, tokenizer, lineage)


def _process_splits(
    run: PrepareRun,
    splits: Sequence[InputSplit],
    own: Mapping[str, DocumentSource],
    sample: float,
    steps: Sequence[tuple[Stage, ...]],
    hashes: bool,
) -> list[TextResult]:
    recipe, stages = run.recipe, steps[0]
    dedup = recipe.dedup if recipe.dedup.active and len(steps) == 1 else None
    content = keys.content_key(recipe.read, stages, keys.stage_files(stages), sample)
    formats = {split.format for split in splits}
    task_keys = {format: task_key(content, format, stages, dedup) for format in formats}
    options = (recipe.read, stages, dedup, sample, str(run.tasks))
    tasks = [
        TextTask(split, *options, task_keys[split.format], recipe.limits, own.get(split.files[0].path), hashes)
        for split in splits
    ]
    sizes = [split.bytes for split in splits]
    return run.map(
        process_split, tasks, lambda task: finished_text(task.prefix), run.count_documents("text", sizes), sizes
    )


def _check_malformed(run: PrepareRun, corpus: Corpus) -> None:
    path = run.out / REJECTS_FILE
    first = write_rejects(path, corpus.splits, corpus.texts, corpus.folder)
    malformed = sum(result.malformed for result in corpus.texts)
    if malformed > run.recipe.max_error_rate * corpus.documents_in:
        write_empty_report(run, corpus)
        examples = "; ".join(f"{reject['where']}: {reject['reason'].rstrip('.')}" for reject in first)
        raise PrepareError(
            f"prepare: expected at most {run.recipe.max_error_rate:.1%} malformed documents, got {malformed} of "
            f"{corpus.documents_in}: {examples}. They are listed in {path}. Fix them, or raise --max-error-rate."
        )
    if not sum(result.documents_out for result in corpus.texts):
        raise no_documents(run, corpus)


def _process_segments(
    run: PrepareRun, sampling: Sampling, texts: list[TextResult], stats: StageStats, steps: Sequence[tuple[Stage, ...]]
) -> list[TextResult]:
    folder = str(run.tasks)
    earlier: tuple[str, ...] = tuple(stage_names(steps[0]))
    for number, stages in enumerate(steps[1:], 2):
        arrows = [f"{folder}/{text.name}.arrow" for text in texts]
        first, chosen = thresholds_of(stages[0], arrows, lambda f, tasks: run.map(f, tasks))
        stats.thresholds += chosen
        stages = (first, *stages[1:])
        dedup = run.recipe.dedup if run.recipe.dedup.active and number == len(steps) else None
        key = keys.content_key(run.recipe.read, stages, keys.stage_files(stages), 1.0)
        key = keys.hash_json([key, keys.versions([], stages)])
        tasks = [
            SegmentTask(text.part(folder), text, split, stages, earlier, dedup, folder, key, run.recipe.limits)
            for text, split in zip(texts, sampling.splits)
        ]
        on_result = run.count_tasks(stages[0].name, len(tasks), " parts")
        texts = run.map(process_segment, tasks, lambda task: finished_text(task.prefix), on_result)
        sampling.count(texts, folder, stats)
        run.progress.set_counts(stats)
        earlier = (*earlier, *stage_names(stages, earlier))
    return texts


def _deduplicated(run: PrepareRun, corpus: Corpus) -> DedupResult | None:
    dedup = run.recipe.dedup
    if not dedup.active:
        return None

    from forebay.prepare.dedup.deduplicate import deduplicate

    def report(step: str, done: int, total: int) -> None:
        run.progress.update(Progress("dedup", done, total, " steps"))

    earlier = sign_parent(run)
    run.progress.set_counts(corpus.stats)
    prefixes = [*earlier, *(f"{corpus.folder}/{text.name}" for text in corpus.texts)]
    folder, first = run.work / "dedup", len(earlier)
    return deduplicate(prefixes, dedup, folder, lambda f, tasks: run.map(f, tasks), report, first=first)


def _trained(run: PrepareRun, texts: Sequence[TextResult]) -> tokenizers.TokenizerFile:
    seed, vocab = run.recipe.slice.seed, tokenizers.vocab_to_train(run.recipe.tokenize.tokenizer) or 0
    parts = [result.part(str(run.tasks)) for result in texts]
    key = keys.hash_json([vocab, seed, version("tokenizers"), [part.name for part in parts]])
    path = run.work / f"trained-{key}" / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        run.progress.update(Progress("tokenizer", 0, 1, " trained"))
        atomic_write(path, tokenizers.train_tokenizer(sample_texts(parts, seed), vocab).data)
        run.progress.update(Progress("tokenizer", 1, 1, " trained"))
    return dataclasses.replace(_load_tokenizer(run.recipe, str(path)), description=run.recipe.tokenize.tokenizer)
