"""Tables in files of others: `open_table` reads them, `TABLE_SINKS` writes them, `verify_table` compares.

Hides: which files of a directory belong together: all of one format, as `formats.detect` says, in the order of their
names. Files that hold no table are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from forebay.convert.arrays import open_idx, open_npy, open_npz, open_rows
from forebay.convert.columns import open_arrow, open_parquet, write_feather, write_parquet
from forebay.convert.content import Options, TableSource, Written
from forebay.convert.images import open_pictures
from forebay.convert.lines import open_csv, open_jsonl, write_csv, write_jsonl
from forebay.convert.rows import write_rows
from forebay.convert.tfrecord import open_tfrecord, write_tfrecord
from forebay.convert.values import TableDigest
from forebay.convert.webdataset import open_samples, write_webdataset
from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.reader import open_dataset
from forebay.errors import DatasetError, UsageError
from forebay.formats import arrow
from forebay.formats.detect import detect, promised
from forebay.prepare.read.listing import Skipped, describe_skipped, list_files

Sink: TypeAlias = Callable[[TableSource, Path, Options], Written]
_NO_OPTIONS = Options()
_OPENERS: Mapping[str, Callable[[Path, Sequence[Path], Options], TableSource]] = {
    "arrow": lambda place, files, _: open_arrow(files),
    "csv": lambda place, files, _: open_csv(files),
    "idx": lambda place, files, _: open_idx(files),
    "images": lambda place, files, _: open_pictures(place if place.is_dir() else files[0].parent, files),
    "jsonl": lambda place, files, _: open_jsonl(files),
    "npy": lambda place, files, options: open_npy(files, options.column),
    "npz": lambda place, files, options: open_npz(files, options.column),
    "parquet": lambda place, files, _: open_parquet(files),
    "safetensors": lambda place, files, _: open_rows(files),
    "tfrecord": lambda place, files, _: open_tfrecord(files),
    "webdataset": lambda place, files, options: open_samples(files, options.max_member_bytes),
}

TABLE_SINKS: Mapping[str, Sink] = {
    "csv": write_csv,
    "feather": write_feather,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "safetensors": write_rows,
    "tfrecord": write_tfrecord,
    "webdataset": write_webdataset,
}


def open_table(path: str | Path, options: Options = _NO_OPTIONS) -> TableSource | None:
    """The table in a file, a directory, or the files of a pattern (`train-*.parquet`); None if there is none.

    The option `column` chooses arrays of .npz and .npy by name: `x_train,y_train`.
    """
    if "://" in str(path):
        return None
    place = Path(path)
    if place.is_dir():
        if (place / MANIFEST_FILE).is_file():
            return _open_own(place)
        if arrow.is_saved(place):
            return open_arrow(arrow.files_of(place), "save_to_disk")
        if (place / "dataset_dict.json").is_file():
            raise UsageError(f"{place}: expected one dataset, got several splits. Name the directory of one.")
    groups, skipped = _by_format(_files(place, options.follow_links))
    if len(groups) > 1:
        told = ", ".join(f"{kind} ({found[0].name} …)" for kind, found in groups.items())
        raise UsageError(f"{place}: expected files of one format, got {told}. Name those of one: 'DIR/*.parquet'.")
    for kind, found in groups.items():
        if skipped and options.strict:
            reasons = "; ".join(describe_skipped(skipped))
            raise UsageError(f"convert --strict: expected to read all of {place}, got files that are not: {reasons}.")
        options.skipped(skipped)
        return _OPENERS[kind](place, found, options)
    return None


def verify_table(source: TableSource, out: Path, written: Written, options: Options = _NO_OPTIONS) -> None:
    """Read again what a sink wrote: rows, and every value of every column."""
    # Of CSV nothing tells the types: text that looks like numbers must come back as text.
    is_csv = any(promised((out / name).name) == "csv" for name in written.files)
    found = (
        open_csv([path for path in _files(out) if isinstance(path, Path)], source.schema) if is_csv else open_table(out)
    )
    if found is None and written.num_rows:
        raise DatasetError(f"{out.name}: expected a table, got none. Nothing was kept. Check the disk.")
    digest = TableDigest()
    for batch in found.batches() if found is not None else ():
        digest.add(batch)
        options.advance(batch.num_rows)
    told: dict[str, str] = orjson.loads(written.digest)
    got = digest.columns()
    bad = sorted(name for name in told if got.get(name) != told[name])
    if digest.num_rows != written.num_rows or bad:
        raise DatasetError(
            f"{out.name}: expected {written.num_rows} rows as they were written, got {digest.num_rows}, with other "
            f"values in {', '.join(bad)[:300] or 'no column'}, when reading them again. Nothing was kept. Write --to "
            "another format, or check the disk."
        )


def _files(place: Path, follow_links: bool = False) -> Iterator[Path | Skipped]:
    """The files behind a path, by name, and what is left out."""
    if place.is_dir():
        yield from list_files(place, follow_links=follow_links)
    elif place.is_file():
        yield place
    elif re.search(r"[*?\[]", place.name):
        yield from sorted(path for path in place.parent.glob(place.name) if path.is_file())


def _by_format(files: Iterable[Path | Skipped]) -> tuple[dict[str, list[Path]], list[Skipped]]:
    """Files that hold tables, by format, and what is left out."""
    groups: dict[str, list[Path]] = {}
    skipped: list[Skipped] = []
    for path in files:
        if isinstance(path, Skipped):
            skipped.append(path)
            continue
        found = detect(path)
        if found.problem:
            raise DatasetError(f"{path}: {found.problem}")
        format = "jsonl" if found.format == "reddit" else found.format
        if format in _OPENERS:
            groups.setdefault(format, []).append(path)
        else:
            skipped.append(Skipped(str(path), f"no table: {format or found.why}"))
    return groups, skipped


def _open_own(place: Path) -> TableSource | None:
    dataset = open_dataset(place)
    if dataset.manifest.layout != "rows":
        return None
    told: Any = dataset.manifest.lineage.get("converted", {})
    facts = {"classes": told["classes"]} if isinstance(told, dict) and "classes" in told else {}
    paths = [dataset.open_slice(index).path for index in range(dataset.num_slices)]  # Opening compares the hashes.
    return replace(open_rows(paths, facts), dataset=dataset)
