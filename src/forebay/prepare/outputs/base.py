"""The `Output` protocol: what a run writes; and the report, which all outputs share."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from forebay.base import Json
from forebay.dataset.slices import hash_file
from forebay.errors import PrepareError, UsageError, printable
from forebay.prepare.corpus import Corpus
from forebay.prepare.recipe import Recipe
from forebay.prepare.report import REPORT_FILE, REPORT_VERSION, write_report
from forebay.prepare.run import PrepareResult, PrepareRun
from forebay.prepare.sampling import describe_sample
from forebay.prepare.stats import Usage, bars
from forebay.prepare.tokenize.tokenizers import TokenizerFile
from forebay.storage.listing import count_reasons
from forebay.storage.store import Store

_MAX_REJECTS, _MAX_SKIPPED, _MAX_REASONS = 50, 200, 50
HITS_FILE, REJECTS_FILE = "contamination.jsonl", "rejects.jsonl"
_MAX_HITS = 20  # Of a set.


class Output(Protocol):
    """What a run writes from its corpus. `PrepareResult.id` is a hash of all that was written."""

    name: str
    """The value of `--to`."""
    marker: str
    """The file that is written last: where it exists, the output is complete. "" if each run makes it again; then the
    inputs are not hashed."""
    needs_tokenizer: bool
    stages: tuple[str, ...] = ()
    """The stages of `write` in their order, for the time that remains."""

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        """Raise UsageError for settings that this output does not have."""

    def load(self, store: Store) -> tuple[str, str, Mapping[str, Any]]:
        """The name, id and lineage of the output in a store. Raises PrepareError if it is damaged."""

    def write(self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile, lineage: Json) -> PrepareResult:
        """Write everything, `marker` last."""


class MarkedOutput(Output):
    """An output whose `marker` is JSON: what is in it, its lineage, and its name in `to`, as some share a marker."""

    needs_tokenizer = False

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        if document_ids:
            raise UsageError(f"document ids: expected a dataset of tokens, got {self.name}; see --write-ids.")
        if recipe.dedup.signatures:
            raise UsageError(f"dedup.signatures: expected --to dataset, got {self.name}, which --extend does not read.")

    def load(self, store: Store) -> tuple[str, str, Mapping[str, Any]]:
        data = store.read(self.marker)
        try:
            content = json.loads(data)
            return content["name"], hashlib.sha256(data).hexdigest(), content["lineage"]
        except (ValueError, KeyError, TypeError) as error:
            raise PrepareError(
                f"{store.url}/{self.marker}: damaged. Choose another directory, or remove this one."
            ) from error

    def conclude(self, run: PrepareRun, corpus: Corpus, content: Json, counts: Json, lineage: Json) -> PrepareResult:
        """Write the report, and the marker with its content."""
        content |= {"name": run.recipe.name, "lineage": {**lineage, "to": self.name, "counts": counts}}
        data = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        commit = partial(run.store.write, self.marker, data)
        return conclude(run, corpus, hashlib.sha256(data).hexdigest(), counts, commit)


@dataclass(frozen=True)
class WrittenFile:
    """A file of an output, by its path there."""

    file: str
    bytes: int
    sha256: str


def put_file(store: Store, name: str, path: Path) -> WrittenFile:
    """Move a complete file of this machine to an object of an output."""
    file = WrittenFile(name, path.stat().st_size, hash_file(path))
    store.put(name, path)
    return file


def conclude(
    run: PrepareRun,
    corpus: Corpus,
    id: str,
    counts: Json,
    commit: Callable[[], object] = lambda: None,
    unwritten_bytes: int = 0,
) -> PrepareResult:
    """Write the report, `commit` the output, which is complete then, and remove what only an unfinished run needs.

    `unwritten_bytes` is the disk space that the recipe would have needed, of what was not written.
    """
    run.progress.set_counts(corpus.stats)
    report = report_data(run, corpus, id, counts, unwritten_bytes)
    write_report(run.store, report, run.progress.all_members())
    commit()
    run.progress.finish("done")
    run.work.remove_all()
    skipped = count_reasons(corpus.inputs.skipped)
    return PrepareResult(run.path, run.recipe.name, id, **counts, skipped=skipped, failed=corpus.failed)


def counts_of(corpus: Corpus, documents_out: int, tokens: int = 0, slices: int = 0) -> Json:
    """The counts of a result and of its lineage."""
    counts = {"documents_in": corpus.documents_in, "documents_out": documents_out, "tokens": tokens, "slices": slices}
    return {**counts, "dropped": corpus.stats.dropped()}


def write_empty_report(run: PrepareRun, corpus: Corpus) -> None:
    """Write the report of a run that stops before there is a dataset: what was read, and why it was dropped."""
    report = report_data(run, corpus, "", counts_of(corpus, 0))
    write_report(run.store, report, run.progress.all_members())


def no_documents(run: PrepareRun, corpus: Corpus) -> PrepareError:
    """Write the report; the error that names what dropped the documents."""
    write_empty_report(run, corpus)
    stages = []
    for name, count in corpus.stats.funnel.items():
        reasons = count.dropped.most_common(3)
        stages += [f"{name} ({', '.join(f'{reason} {n:,}' for reason, n in reasons)})"] if reasons else []
    if stages:
        is_read = all(stage.startswith("read ") for stage in stages)
        advice = "Give other inputs" if is_read else "Loosen these stages"
        if "nothing_learnt" in stages[-1]:
            advice = "No message of the role assistant is left to learn from: see their roles, and rows.max_tokens"
        if run.parent is not None and "dedup (" in stages[-1]:
            advice = f"There is nothing new: {run.parent.path} has these documents"
        cause = f"dropped by {'; '.join(stages)}. {advice}; the report is {run.store.url}/{REPORT_FILE}."
    else:
        cause = f"the inputs hold no documents. See {run.store.url}/{REPORT_FILE}."
    return PrepareError(f"prepare: expected documents with text, got none: {corpus.documents_in:,} read, {cause}")


def report_data(run: PrepareRun, corpus: Corpus, id: str, counts: Json, unwritten_bytes: int = 0) -> Json:
    """The contents of the report, as JSON: the same for the same input, but for the `cost` that a sample has."""
    stats, funnel = corpus.stats, list(corpus.stats.funnel.items())
    return {
        "version": REPORT_VERSION,
        "name": run.recipe.name,
        "id": id,
        "created_with": f"forebay {version('forebay')}",
        "recipe": run.recipe.to_json(),
        "totals": {
            **{key: counts[key] for key in ("documents_in", "documents_out", "tokens", "slices")},
            "bytes_in": funnel[0][1].bytes_in,
            "bytes_out": funnel[-1][1].bytes_out,
            "malformed": sum(text.malformed for text in corpus.texts),
        },
        "inputs": _count_inputs(corpus),
        "failed": corpus.failed,
        "skipped": count_reasons(corpus.inputs.skipped),
        "skipped_files": [
            {**item._asdict(), "path": printable(item.path)}
            for item in sorted(corpus.inputs.skipped, key=lambda item: item.status)[:_MAX_SKIPPED]
        ],
        "funnel": [{"stage": name, **vars(count)} for name, count in funnel],
        "histograms": {name: bars(sides) for name, sides in stats.histograms.items()},
        "thresholds": stats.thresholds,
        "rules": stats.measured.report(list(stats.funnel)),
        "languages": stats.languages,
        "subsets": stats.subsets,
        "samples": [
            {"stage": stage, "reason": reason, "where": s.location, "url": s.url, "text": s.text}
            for (stage, reason), samples in stats.samples.items()
            for s in samples
        ],
        **_rejects(run.store),
        **_contamination(run),
        **_sample(run, corpus, counts, unwritten_bytes),
    }


def _sample(run: PrepareRun, corpus: Corpus, counts: Mapping[str, Any], unwritten_bytes: int) -> Json:
    if corpus.sampling.is_whole:
        return {}
    folders = (".work/", "slices/", "text/", "tokens/")
    files = {name: size for folder in folders for name, size in run.store.sizes(folder).items()}
    # Of tasks: not what is of another size each time, which is small.
    sizes = (size for name, size in files.items() if not name.endswith((".stats", ".json", ".rejects")))
    usage = Usage()
    for part in (corpus.stats.usage, run.usage):
        usage.add(part)
    figures = {name: counts[name] for name in ("documents_in", "documents_out", "tokens")}
    figures |= {
        "text_bytes": corpus.stats.last.bytes_out,
        "disk_bytes": sum(sizes) + unwritten_bytes,
    }
    return describe_sample(corpus.sampling, corpus.texts, corpus.stats, usage, figures)


def _contamination(run: PrepareRun) -> Json:
    """What each evaluation set has, in how many documents it was found, and the first of these."""
    stages = [stage for stage in run.recipe.stages if stage.name == "decontaminate"]
    if not stages:
        return {}
    sets = {count.name: {**vars(count), "documents": 0} for stage in stages for count in stage.index().sets}  # type: ignore[attr-defined]
    hits = []
    for hit in _lines(run.store, HITS_FILE):
        entry = sets.setdefault(hit["set"], {"name": hit["set"], "documents": 0})
        entry["documents"] += 1
        if entry["documents"] <= _MAX_HITS:
            hits.append(hit)
    return {"contamination": {"sets": list(sets.values()), "hits": hits}}


def _count_inputs(corpus: Corpus) -> list[Json]:
    counts = {(s.path, s.sha256): [0, 0] for s in corpus.inputs.files}
    for split, text in zip(corpus.splits, corpus.texts):
        if len(split.files) == 1:
            own = counts[split.files[0].path, split.files[0].sha256]
            own[0] += text.documents_in
            own[1] += text.malformed
            continue
        for source in split.files:
            counts[source.path, source.sha256][0] += 1
        if text.malformed:
            for line in corpus.store.read(f"{text.prefix}.rejects").splitlines():
                source = split.files[json.loads(line)["place"]]
                counts[source.path, source.sha256][1] += 1
    return [
        {"name": s.name, "format": s.format_read, "bytes": s.bytes, "documents": documents, "malformed": malformed}
        for s in corpus.inputs.files
        for documents, malformed in [counts[s.path, s.sha256]]
    ]


def _lines(store: Store, name: str) -> Iterator[Json]:
    """The lines of JSON of an object; none if it is missing."""
    if store.exists(name):
        with store.local(name) as path, path.open("rb") as file:
            yield from map(json.loads, file)


def _rejects(store: Store) -> Json:
    """The first malformed records, and how many there are by reason; the rarest reasons are counted together."""
    first: list[Json] = []
    reasons: Counter[str] = Counter()
    for reject in _lines(store, REJECTS_FILE):
        if len(first) < _MAX_REJECTS:
            first.append({"where": reject["where"], "reason": reject["reason"]})
        is_counted = reject["reason"] in reasons or len(reasons) < _MAX_REASONS
        reasons[reject["reason"] if is_counted else "other reasons"] += 1
    common = dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
    return {"rejects": first, "rejected": common}
