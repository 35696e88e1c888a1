"""`prepare_dataset`: raw text to a dataset. The tasks in their order, and the checks around them.

    TEXT (read, clean, filter, sign) → PERCENTILE → DEDUP → the output: ENCODE → SHUFFLE → SLICE → manifest, report

OUT is a directory or a prefix of a bucket. Finished tasks stay in `OUT/.work` and outlive a killed run. The same inputs
and recipe give the same bytes for any number of workers, any engine and any number of interruptions. Needs space for
the kept text once (LZ4) and the tokens twice, three times if documents are shuffled.
"""

import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.base import Json
from forebay.dataset.manifest import printable_name
from forebay.errors import (
    CorruptInputError,
    ForebayError,
    PrepareError,
    UsageError,
    package_for,
    printable,
    unknown_name,
)
from forebay.files import remove_stale
from forebay.formats.inputs import RESERVED_COLUMNS, InputFile, InputSplit, OutputBudget
from forebay.formats.parquet import recorded_columns
from forebay.machine import num_cores
from forebay.order.step_index import check_integer
from forebay.prepare.config import apply_settings, load_recipe, merge
from forebay.prepare.corpus import SKIPPED_FILE, Corpus, count_failed, read_skipped, write_skipped
from forebay.prepare.dedup.methods import KINDS, Dedup, Method
from forebay.prepare.documents import Stage
from forebay.prepare.engines.base import Engine, open_engine
from forebay.prepare.engines.share import ShareEngine, parse_share
from forebay.prepare.extend import open_parent, sign_parent
from forebay.prepare.forecast import Progress
from forebay.prepare.inputs import InputFiles, find_inputs, split_files
from forebay.prepare.kernels import compile_groups, missing_groups
from forebay.prepare.lineage import is_same, lineage_of, with_hashes
from forebay.prepare.outputs.base import HITS_FILE, REJECTS_FILE, Output, no_documents, write_empty_report
from forebay.prepare.outputs.text import SUFFIXES, LanguageModelOutput, TextOutput
from forebay.prepare.outputs.tokens import DatasetOutput, MegatronOutput, ReportOutput
from forebay.prepare.progress import RUN_FILE, ProgressRecord, read_progress
from forebay.prepare.recipe import Recipe
from forebay.prepare.run import PrepareResult, PrepareRun, TasksFinishedError, disk_errors, reserve
from forebay.prepare.run_tokenizer import open_tokenizer, train
from forebay.prepare.sampling import Sampling
from forebay.prepare.scores.base import TYPES, annotating, segments, without_scoring
from forebay.prepare.sources import DocumentSource, open_source, source_splits
from forebay.prepare.stats import StageStats, Usage
from forebay.prepare.tasks import keys
from forebay.prepare.tasks.percentile import SegmentTask, process_segment, thresholds_of
from forebay.prepare.tasks.stages import stage_names
from forebay.prepare.tasks.text import TextResult, TextTask, process_split, task_key, write_records
from forebay.prepare.tokenize import tokenizers
from forebay.storage.listing import Skipped, by_cause, count_reasons, describe_skipped, first_paths
from forebay.storage.store import Store, open_store
from forebay.units import numbered

if TYPE_CHECKING:
    from forebay.prepare.dedup.deduplicate import DedupResult

OUTPUTS: tuple[Output, ...] = (
    DatasetOutput(), *map(TextOutput, SUFFIXES), MegatronOutput(), LanguageModelOutput(), ReportOutput(),
)  # fmt: skip


@package_for("prepare_dataset")
def prepare_dataset(
    inputs: str | Path | DocumentSource | Sequence[str | Path | DocumentSource],
    out: Path | str,
    *,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    tokenizer: tokenizers.AnyTokenizer | None = None,
    filters: str | Stage | Sequence[str | Stage] = (),
    dedup: str | Method | Sequence[str | Method] = (),
    name: str | None = None,
    slice_bytes: int | str | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    to: str | Output = "dataset",
    annotate: bool = False,
    write_ids: Path | None = None,
    document_ids: bool = False,
    extend: Path | str | None = None,
    engine: str | Engine = "local",
    task: str = "",
    workers: int | None = None,
    follow_links: bool = False,
    strict: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_message: Callable[[str], None] | None = None,
) -> PrepareResult:
    """Prepare a dataset of raw text. A killed call resumes when it is called again.

    Args:
        inputs: One or several: files, directories, patterns and URLs of any format of `forebay.formats`; inputs of
            entry points of `forebay.sources`; or objects of the protocol `DocumentSource`, whose documents come last.
        out: The dataset's directory, which is created, or a prefix of a bucket: s3://, r2://, gs://, az://.
        recipe: What to do with the text: a Recipe, its tables, a TOML file, or the name of a recipe that comes with
            Forebay. Without one the text is tokenized as it is. The arguments that follow are laid over it.
        tokenizer: As `[tokenize] tokenizer`; or an object of the protocol `Tokenizer`, of `tokenizers`, or a fast one
            of `transformers`.
        filters: Stages after those of the recipe: names of stages, of entry points of `forebay.filters`,
            `module:Class`, or objects.
        dedup: Methods besides those of the recipe: the names of `dedup.methods.KINDS`, of entry points of
            `forebay.dedup`, `module:Class`, or objects.
        name, slice_bytes, seed: As in the recipe; the name is by default the directory's.
        settings: Nested tables of a recipe: `{"read": {"text_key": "body"}}`.
        to: `dataset`; `parquet`, `jsonl`, `arrow`, `webdataset`, `mds` or `litdata`: files of the kept text and its
            columns in `out/text`; `megatron`: one .bin and .idx of tokens in `out/tokens`; `lm`: a language model,
            `out/model.arpa`; `report`: the report alone, in place of an earlier one; or an object of the protocol
            `Output`.
        annotate: Write the text with its columns and scores, as `to="parquet"`, which is then the default; stages that
            would drop documents are left out, and so is deduplication.
        write_ids: Write the source id of each kept document here, one a line, in the order of the input: its `id` in
            the input, else `path:line` (or row), or the path of a text file.
        document_ids: Write the source id and file of each document to `documents.parquet`, in the order of the dataset.
            The slices are the same; the manifest, and so the dataset's id, is another.
        extend: A dataset's directory. The new dataset has all its slices first, as hard links, and after them slices of
            these inputs; its manifest names the parent. The tokenizer is by default the parent's. Deduplication
            compares the new documents with the parent's, by the text of their tokens, and refuses what has none.
        engine: `local` (processes of this machine), `ray`, the name of an entry point of `forebay.engines`, or an
            object of the protocol `Engine`.
        task: `I/N`: this call is one of N, of the same arguments, that share the tasks over a bucket, or a directory
            that all see, such as the jobs of an array; it returns when all tasks are finished, with a result without
            an id. `finish`: the call that then writes the output; it may begin at once, and takes part.
        workers: Processes; by default one a core (of the whole cluster, with Ray). The bytes do not depend on it.
        follow_links: Read what links in input folders lead to, also outside these folders.
        strict: Fail if an input would be left out, or cannot be read.
        on_progress: Called in this thread about once a second.
        on_message: Called in this thread with what went wrong, such as a worker that died and is tried again, or a
            reason why inputs are left out; by default a warning of the logger `forebay.prepare`.

    Raises:
        UsageError: If a setting is invalid, or `out` holds another dataset or is in use.
        PrepareError: If an input is missing, changes while it is read or is damaged beyond `[read] max_malformed`,
            there is no document (the report and `skipped.jsonl` are written all the same), or the disk is full.
    """
    if not isinstance(out, str | os.PathLike):
        raise UsageError(f"out: expected a directory or the URL of a bucket, got {out!r:.100}.")
    store = open_store(out)
    inputs, filters, dedup = map(_listed, (inputs, filters, dedup))
    _check_kinds("inputs", inputs, "parts", "paths, URLs or sources", "Write the documents to a file of JSON lines")
    _check_kinds(
        "filters", filters, "apply", "names or stages",
        'Decorate the function with @forebay.text_filter("NAME", version="1"), and pass a call of it: filters=[NAME()]',
    )  # fmt: skip
    _check_kinds("dedup", dedup, "sign", "names or methods", f"Name some of {', '.join(KINDS)}")
    check_integer("workers", workers, 1)
    to = "parquet" if annotate and to == "dataset" else to
    output = next((output for output in OUTPUTS if output.name == to), to)
    if isinstance(output, str):
        raise unknown_name("to", [output.name for output in OUTPUTS], to)
    arguments: Json = {
        "name": name,
        "tokenize": {"tokenizer": tokenizer if isinstance(tokenizer, str | None) else tokenizers.name_of(tokenizer)},
        "slice": {"bytes": slice_bytes, "seed": seed},
    }
    if not isinstance(settings, Mapping | None):
        raise UsageError(f"settings: expected {{table: {{key: value}}}}, got {settings!r:.100}.")
    if isinstance(recipe, Mapping):
        settings, recipe = merge(recipe, settings or {}), None
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    recipe = apply_settings(recipe, [settings or {}, arguments], filters, dedup)
    recipe = recipe if recipe.name else replace(recipe, name=_name_of(store))
    if annotate:
        recipe = replace(recipe, stages=annotating(recipe.stages), dedup=Dedup())
    share = parse_share(task) if task not in ("", "finish") else None
    if task and engine != "local":
        raise UsageError(
            f"task: expected the local engine, which each process has, got {engine!r}. Leave out one of both."
        )
    on_message = on_message or logging.getLogger("forebay.prepare").warning
    progress = ProgressRecord(
        store, recipe.name, output.name, workers or num_cores(), on_progress, on_message,
        member=str(share[0]) if share is not None else "",
    )  # fmt: skip
    notify = progress.notify
    parent = open_parent(extend, store) if extend is not None else None
    own = tokenizer if output.needs_tokenizer and not isinstance(tokenizer, str) else None
    recipe, loaded = open_tokenizer(recipe, own, output, document_ids, parent, notify)
    sources, own_sources = _open_inputs(inputs or recipe.inputs, recipe, workers or num_cores(), store, follow_links)
    for line in (*describe_skipped(sources.skipped), *_describe_texts(sources.files)):
        notify(line)
    if strict:
        _refuse_skipped(sources.skipped)
    if task:
        engine = ShareEngine(workers, *(share or (0, 1)), store.child(".work"), notify)
    opener = open_engine(engine, workers, store, notify)
    with progress.recorded(), disk_errors(store), store.locked(shared=bool(task)), opener as opened:
        progress.watch(opened)
        if write_ids is not None:  # fail now rather than when all the work is done
            Path(write_ids).parent.mkdir(parents=True, exist_ok=True)
            remove_stale(Path(write_ids).parent)
        own_splits = [(split, item) for item in own_sources for split in source_splits(item)]
        listed = (*sources.files, *(split.files[0] for split, _ in own_splits))
        recipe, recorded = _with_recorded_columns(recipe, sources.files if not own_splits else (), notify)
        sources = replace(sources, files=listed, sample=recipe.sample if own_sources else sources.sample)
        run = PrepareRun(
            store, recipe, opened, write_ids, document_ids, progress, notify, parent, recorded,
            is_shared=bool(task) or store.folder is None, is_member=share is not None,
        )  # fmt: skip
        try:
            return _run(run, _Job(output, sources, own_splits, loaded, strict))
        except TasksFinishedError:
            if store.exists(RUN_FILE):  # else another process has written the output
                progress.finish("ended", "all tasks are finished: `forebay prepare --task finish` writes the output")
            return PrepareResult(run.path, recipe.name, "", 0, 0, 0, 0)


def _listed(items: Any) -> list[Any]:
    """Return the items of a list; another thing is the only one."""
    return list(items) if isinstance(items, list | tuple | set | Iterator) else [items]


def _check_kinds(name: str, items: Sequence[object], method: str, expected: str, advice: str) -> None:
    """Raise UsageError unless each item is a name, a path, or an object with this method."""
    for item in items:
        if isinstance(item, type) and hasattr(item, method):
            raise UsageError(
                f"{name}: expected a call of {item.__name__}, got itself. Give {name}=[{item.__name__}()]."
            )
        if not (isinstance(item, str | os.PathLike) or hasattr(item, method)):
            raise UsageError(
                f"{name}: expected {expected}, got {getattr(item, '__name__', type(item).__name__)}. {advice}."
            )


def _open_inputs(
    inputs: Sequence[str | Path | DocumentSource], recipe: Recipe, workers: int, store: Store, follow_links: bool
) -> tuple[InputFiles, list[DocumentSource]]:
    """The files of the inputs, and the document sources. A run with document sources lists all files."""
    opened = [(source, open_source(source)) for source in inputs]
    own_sources = [own_source for _, own_source in opened if own_source is not None]
    paths = [source for source, own_source in opened if own_source is None and isinstance(source, str | Path)]
    if own_sources and not paths:
        return InputFiles(()), own_sources
    sample = 1.0 if own_sources else recipe.sample
    out = store.folder
    for path in map(Path, paths if out is not None else ()):
        if out is not None and path.is_dir() and path.resolve().is_relative_to(out.resolve()):
            raise UsageError(
                f"prepare: expected --out beside or below the input folder {path}, got {out}, which is or contains it. "
                f"Choose another --out, such as {path.resolve().name}-dataset."
            )
    files = find_inputs(paths, recipe.read, workers=workers, leave_out=out, follow_links=follow_links, sample=sample)
    return files, own_sources


def _describe_texts(files: Sequence[InputFile]) -> Iterator[str]:
    """Yield a line for each field that has the text of files which have no `text`, and for what most records lack."""
    lacking = [Skipped(file.path, file.missing) for file in files if file.missing and not file.is_textless]
    yield from (f"{group[0].reason} ({first_paths(group)})" for group in by_cause(lacking))
    keys = [file.text_key for file in files]
    for key in sorted(set(keys) - {""}):
        yield (
            f"text is in {printable(key)!r} in {keys.count(key):,} of {len(files):,} inputs, such as "
            f"{printable(files[keys.index(key)].path)}"
        )


def _with_recorded_columns(
    recipe: Recipe, files: Sequence[InputFile], notify: Callable[[str], None]
) -> tuple[Recipe, Json]:
    """The recipe for input that has columns of an earlier run: it reads them, and does not score again.

    Also what made those scores, by column. All files must have a column, made in the same way.
    """
    columns: Json = {}
    for number, file in enumerate(files):
        recorded = recorded_columns(file) if file.format == "parquet" else {}
        columns = recorded if number == 0 else {n: c for n, c in columns.items() if recorded.get(n) == c}
        if not columns:
            break
    named = recipe.read.columns
    usable = {n: c for n, c in columns.items() if n not in {*named, *RESERVED_COLUMNS} and c.get("kind") in [*TYPES]}
    made_by = {**{name: c.get("scorer") for name, c in usable.items()}, **dict.fromkeys(named)}
    stages, again = without_scoring(recipe.stages, {n: s for n, s in made_by.items() if n in named or s is not None})
    for name in again:
        notify(f"{name}: the input has its columns, made with other settings or another version: it is scored again")
    made_again = {column for stage in stages for column in getattr(stage, "adds", getattr(stage, "scored", ()))}
    kinds = {name: c["kind"] for name, c in usable.items() if name not in made_again}
    if not kinds and stages == recipe.stages:
        return recipe, {}
    read = replace(recipe.read, columns={**named, **kinds})
    recorded = {name: made_by[name] for name in kinds if made_by[name] is not None}
    return replace(recipe, read=read, stages=stages), recorded


def _refuse_skipped(skipped: Sequence[Skipped]) -> None:
    if skipped:
        raise PrepareError(
            f"prepare --strict: expected to read all inputs, got {len(skipped)} that cannot be read: "
            f"{'; '.join(f'{printable(item.path)}: {item.reason}'.rstrip('.') for item in skipped[:3])}. Remove "
            "them from the input, or leave out --strict."
        )


def _name_of(store: Store) -> str:
    path = str(store.folder.resolve()) if store.folder is not None else store.url
    if path.encode(errors="ignore").decode() != path:  # Arrow opens no file of such a name.
        raise UsageError(f"prepare: expected --out in UTF-8, got {path!r}. Name another directory.")
    return printable_name(path.rstrip("/").rpartition("/")[2])


def _find_existing(run: PrepareRun, output: Output, sources: InputFiles, lineage: Json) -> PrepareResult | None:
    existing = next(
        (candidate for candidate in (output, *OUTPUTS) if candidate.marker and run.store.exists(candidate.marker)),
        None,
    )
    if existing is None:
        if run.store.sizes("slices/") and not run.work.sizes():
            raise UsageError(
                f"prepare: {run.store.url}/slices is not from an unfinished run. Choose another directory."
            )
        return None
    name, id, theirs = existing.load(run.store)
    kind = theirs.get("to", existing.name)
    same = kind == output.name and name == run.recipe.name
    same = same and ("documents.parquet" in theirs.get("files", {})) == run.document_ids
    same = same and (run.write_ids is None or run.write_ids.exists()) and is_same(run, sources, theirs, lineage)
    if not same:
        raise UsageError(
            f"prepare: expected an empty directory, got {run.store.url}, which holds {kind} {name!r} "
            f"({id[:12]}…){', a sample' * (theirs.get('recipe', {}).get('sample', 1) < 1)}. A dataset never changes: "
            "choose another directory, or remove this one."
        )
    skipped = read_skipped(run.store)
    failed = count_failed(skipped, sources.files, sum(file.bytes for file in sources.files))
    return PrepareResult(
        run.path, name, id, **theirs["counts"], already_exists=True, skipped=count_reasons(skipped), failed=failed
    )  # fmt: skip


def _failed(splits: Sequence[InputSplit], texts: Sequence[TextResult]) -> list[Skipped]:
    failed: dict[str, Skipped] = {}
    for split, text in zip(splits, texts):
        for index, (reason, missing, _) in text.failed.items():
            path = split.files[int(index)].path
            before = failed.get(path, Skipped(path, reason.removeprefix(f"{path}: "), "failed"))
            failed[path] = before._replace(bytes=before.bytes + missing)
    return list(failed.values())


def _refuse_failed(run: PrepareRun, sources: InputFiles, failed: Mapping[str, float], unread: Collection[str]) -> None:
    """Raise PrepareError if too much of the input failed, or there are `unread` inputs, which the user names."""
    limit, lost = run.recipe.max_error_rate, failed["share"]
    if limit >= 1 or not (unread or lost > limit or (failed["inputs"] and not limit)):
        return
    first = sorted(
        (item for item in sources.skipped if item.status == "failed"), key=lambda item: item.path not in unread
    )
    causes = sorted(by_cause(first), key=lambda files: first.index(files[0]))
    examples = "; ".join(
        f"{printable(files[0].path)}{f' and {len(files) - 1:,} more' * (len(files) > 1)}: "
        f"{files[0].reason.partition('. ')[0].rstrip('.')}"
        for files in causes[:3]
    )
    advice = first[0].reason.partition(". ")[2]
    is_known = not any(item.path.endswith("/") for item in first)  # A folder may hold anything.
    allowed = math.floor(100 * lost + 1) / 100 if is_known else 1
    more = f" To go on without them: --set max_error_rate={allowed:g}."
    if unread or (is_known and allowed >= 1):
        more = ""
    raise PrepareError(
        "prepare: expected "
        f"{f'at most {limit:.1%} of the input to fail' if lost > limit else 'that named inputs can be read'}, got "
        f"{f'{lost:.1%} of its bytes' if is_known else 'an unknown share'} in "
        f"{numbered(int(failed['inputs']), 'input')} that failed: {examples}. {f'{advice} ' * bool(advice)}They are "
        f"listed in {run.store.url}/{SKIPPED_FILE}. Fix or remove them; finished work is kept.{more}"
    )


@dataclass(frozen=True)
class _Job:
    """What a run reads and writes.

    Args:
        sources: All files, those of document sources last.
        own_splits: The splits of document sources.
        tokenizer: None if it is to be trained.
        strict: Inputs that cannot be read end the run.
    """

    output: Output
    sources: InputFiles
    own_splits: Sequence[tuple[InputSplit, DocumentSource]]
    tokenizer: tokenizers.TokenizerFile | None
    strict: bool


def _run(run: PrepareRun, job: _Job) -> PrepareResult:
    output, sources = job.output, job.sources
    lineage = lineage_of(run, sources, job.tokenizer)
    recipe = {**lineage["recipe"], "max_error_rate": None}  # With another one the same tasks go on.
    key = keys.hash_json([recipe, output.name, lineage["inputs"], lineage.get("parent")])
    _check_code(run, key, output)
    if (existing := _find_existing(run, output, sources, lineage)) is not None:
        if not run.is_member:
            run.store.remove_stale()
            run.work.remove_all()
        return existing
    run.work.directory("")  # This user's alone: what lies there is believed.
    run.progress.unfinished = reserve(run.store, key, run.on_message, exclusive=not run.is_shared)
    try:
        return _run_tasks(run, job, lineage, key)
    except (OSError, ForebayError):
        # Another process may have completed the same output, and removed what it does not need.
        if run.is_shared and (existing := _find_existing(run, output, sources, lineage)) is not None:
            run.work.remove_all()  # what this process wrote meanwhile
            return existing
        raise


def _check_code(run: PrepareRun, key: str, output: Output) -> None:
    """Raise UsageError where the user's own filter or method is another than in an earlier call for this output."""
    code = run.progress.code = keys.code_versions((*run.recipe.stages, *run.recipe.dedup.own))
    with suppress(PrepareError, KeyError):  # There was no earlier call, or none that told its code.
        earlier: Json = read_progress(run.path) if code else {"key": ""}
        is_done = earlier["state"] == "done"
        is_used = earlier["key"] == key and (output.marker if is_done else run.work.sizes("done/"))
        before: Json = earlier["code"] if is_used else {}
        changed = [
            name for name, now in code.items()  # Unfinished tasks of another version are others.
            if (was := before.get(name, now)) != now and (is_done or was[0] == now[0])
        ]  # fmt: skip
        if changed:
            raise UsageError(
                f"prepare: expected the code that {run.store.url} was made with, got another of {', '.join(changed)}. "
                f"{'Choose another directory, or remove this one' if is_done else 'Give it another version'}."
            )


def _run_tasks(run: PrepareRun, job: _Job, lineage: Json, key: str) -> PrepareResult:
    output, sources = job.output, job.sources
    expected = replace(sources, skipped=(*sources.skipped, *sources.textless))
    write_skipped(run.store, expected.skipped)
    run.progress.skipped = count_reasons(sources.skipped)
    failed = count_failed(expected.skipped, sources.files, sum(file.bytes for file in sources.files))
    _refuse_failed(run, expected, failed, {item.path for item in sources.textless if item.path in sources.named})
    run.store.remove_stale()
    run.progress.start(key)
    _compile_kernels(run, {file.format for file in sources.files})
    own = {split.files[0].path: source for split, source in job.own_splits}
    files = sources.files[: len(sources.files) - len(job.own_splits)]
    listed = [*split_files(files, run.recipe.read), *(split for split, _ in job.own_splits)]
    sampling = Sampling.of(listed, sources.sample, sources.scale)
    splits, stages = sampling.splits, run.recipe.stages
    content = keys.content_key(run.recipe.read, stages, keys.stage_files(stages), sampling.fraction)
    steps = segments(stages)
    before = ["dedup"] * run.recipe.dedup.active + ["tokenizer"] * (job.tokenizer is None)
    run.progress.plan("text", *before, *getattr(output, "stages", ()))
    texts = _process_splits(run, sampling, own, steps, hashes=bool(output.marker))
    missing = _failed(splits, texts)
    file_sizes = {file.path: file.bytes for file in sources.files}
    unread = {item.path for item in missing if item.path in sources.named and item.bytes >= file_sizes[item.path]}
    sources = replace(sources, skipped=(*sources.skipped, *missing))
    write_skipped(run.store, sources.skipped)
    run.progress.skipped = count_reasons(sources.skipped)
    for line in describe_skipped(missing):
        run.on_message(line)
    if job.strict:
        _refuse_skipped(missing)
    stats = StageStats()
    sampling.count(texts, run.work, stats, run.map)
    run.progress.set_counts(stats)
    corpus = Corpus(sources, splits, texts, None, run.work, stats, sampling)
    _check_malformed(run, corpus, unread)
    hashed = {
        split.files[int(index)].path: sha256
        for split, text in zip(splits, texts)
        for index, sha256 in text.sha256s.items()
    }
    if output.marker:
        lineage = with_hashes(run, sources, lineage, hashed)
    sha256s = {source.path: entry["sha256"] for source, entry in zip(sources.files, lineage["inputs"])}
    texts = [replace(text, key=keys.random_key(content, split, sha256s)) for split, text in zip(splits, texts)]
    texts = _process_segments(run, sampling, texts, stats, steps)
    write_records(run.store, HITS_FILE, splits, texts, run.work, "hits")
    corpus = replace(corpus, texts=texts)
    if len(steps) > 1:
        _check_malformed(run, corpus, unread)
    corpus = replace(corpus, dedup=_deduplicated(run, corpus))
    return output.write(run, corpus, job.tokenizer or train(run, texts), lineage)


def _compile_kernels(run: PrepareRun, formats: Collection[str]) -> None:
    groups = missing_groups(run.recipe, formats)
    if not groups:
        return
    count = run.count_tasks("kernels", len(groups), "group")
    if run.progress.on_progress is None:
        run.on_message(f"compiling kernels, once on this machine: {', '.join(group.name for group in groups)}")

    def add(index: int, seconds: float) -> None:
        usage = Usage({"kernels": seconds})
        run.usage.add(usage)
        run.progress.add(usage, None)
        count(index, None)

    workers = run.engine.num_workers or num_cores()
    compile_groups(prepare_dataset, groups, workers, add, run.on_message, run.progress.tick)


def _process_splits(
    run: PrepareRun,
    sampling: Sampling,
    own: Mapping[str, DocumentSource],
    steps: Sequence[tuple[Stage, ...]],
    hashes: bool,
) -> list[TextResult]:
    recipe, stages, splits = run.recipe, steps[0], sampling.splits
    dedup = recipe.dedup if recipe.dedup.active and len(steps) == 1 else None
    files = keys.stage_files(stages)
    task_keys = {
        (format, share): task_key(keys.content_key(recipe.read, stages, files, share), format, stages, dedup)
        for format, share in {(split.format, share) for split, share in zip(splits, sampling.shares)}
    }
    tasks = [
        TextTask(
            split, stages, (), dedup, run.work, task_keys[split.format, share], recipe.limits, recipe.read, share,
            own.get(split.files[0].path), hashes,
        )
        for split, share in zip(splits, sampling.shares)
    ]  # fmt: skip
    sizes, kinds = [split.bytes for split in splits], [split.kind for split in splits]
    # One of each kind starts first: then the remaining time is known.
    firsts = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    weights = [size + (index in firsts.values()) * sum(sizes) for index, size in enumerate(sizes)]
    # Of the sum of all splits: whether the run fails does not depend on their order.
    budget = OutputBudget(InputSplit(tuple({f.path: f for split in splits for f in split.files}.values())), recipe.read)
    count = run.count_documents("text", sizes, kinds)

    def add(index: int, result: TextResult) -> None:
        count(index, result)
        try:
            if splits[index].files[0].bytes and tasks[index].source is None:  # not of a connector
                budget.spend(result.bytes_in)
        except CorruptInputError as error:
            raise PrepareError(f"{tasks[index].label} and the inputs before it: {error}") from error

    return run.map(process_split, tasks, add, weights)


def _check_malformed(run: PrepareRun, corpus: Corpus, unread: Collection[str]) -> None:
    """Raise PrepareError if too many documents are malformed, too much of the inputs failed, or nothing is left."""
    first = write_records(run.store, REJECTS_FILE, corpus.splits, corpus.texts, corpus.store, "rejects")
    try:
        _refuse_failed(run, corpus.inputs, corpus.failed, unread)
    except PrepareError:
        write_empty_report(run, corpus)
        raise
    of_failed = sum(records for text in corpus.texts for _, _, records in text.failed.values())
    malformed = sum(result.malformed for result in corpus.texts) - of_failed
    if malformed > run.recipe.max_error_rate * corpus.documents_in:
        write_empty_report(run, corpus)
        more = f", or allow more: --set max_error_rate={(100 * malformed // corpus.documents_in + 1) / 100:g}"
        examples = "; ".join(f"{reject['where']}: {reject['reason'].rstrip('.')}" for reject in first)
        raise PrepareError(
            f"prepare: expected at most {run.recipe.max_error_rate:.1%} malformed documents, got {malformed} of "
            f"{corpus.documents_in}: {examples}. They are listed in {run.store.url}/{REJECTS_FILE}. "
            f"Fix them{more if malformed < corpus.documents_in else ''}."
        )
    if not sum(result.documents_out for result in corpus.texts):
        raise no_documents(run, corpus)


def _process_segments(
    run: PrepareRun, sampling: Sampling, texts: list[TextResult], stats: StageStats, steps: Sequence[tuple[Stage, ...]]
) -> list[TextResult]:
    earlier: tuple[str, ...] = tuple(stage_names(steps[0]))
    for number, stages in enumerate(steps[1:], 2):
        arrows = [text.part.arrow for text in texts]
        first, chosen = thresholds_of(run.work, stages[0], arrows, run.map)
        stats.thresholds += chosen
        stages = (first, *stages[1:])
        dedup = run.recipe.dedup if run.recipe.dedup.active and number == len(steps) else None
        key = keys.content_key(run.recipe.read, stages, keys.stage_files(stages), 1.0)
        key = keys.hash_json([key, keys.versions([], stages)])
        tasks = [
            SegmentTask(split, stages, earlier, dedup, run.work, key, run.recipe.limits, text.part, text)
            for text, split in zip(texts, sampling.splits)
        ]
        on_result = run.count_tasks(stages[0].name, len(tasks), "part")
        texts = run.map(process_segment, tasks, on_result)
        sampling.count(texts, run.work, stats, run.map)
        run.progress.set_counts(stats)
        earlier = (*earlier, *stage_names(stages, earlier))
    return texts


def _deduplicated(run: PrepareRun, corpus: Corpus) -> "DedupResult | None":
    dedup = run.recipe.dedup
    if not dedup.active:
        return None

    from forebay.prepare.dedup.deduplicate import deduplicate

    def report(step: str, done: int, total: int) -> None:
        if done:
            run.progress.advance(1)
        else:
            run.progress.begin("dedup", {"": total}, "step", total)

    earlier = sign_parent(run)
    run.progress.set_counts(corpus.stats)
    signed = [*earlier, *(text.signed for text in corpus.texts if text.signed is not None)]
    return deduplicate(signed, dedup, run.work, run.map, report, first=len(earlier), keep_used=run.is_shared)
