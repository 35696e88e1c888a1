"""Tokens to SafeTensors: a dataset of Forebay's own, or plain files without a manifest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from forebay.convert.content import Options, TokenSource, Written
from forebay.convert.streams import Stream, settle, slices_of
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, Manifest, SliceInfo, SliceTable
from forebay.dataset.reader import listed_files
from forebay.dataset.slices import hash_file, write_rows_slice, write_token_slice
from forebay.storage.atomic import atomic_write

_COPIED = ("tokenizer.json",)


def write_safetensors(source: TokenSource, out: Path, options: Options) -> Written:
    """A dataset of layout `tokens`; with `more["flat"]`, files alone: `tokens` and `document_ends`, or with `seq_len`
    `input_ids` [N, seq_len]."""
    if options.more.get("flat"):
        return _write_flat(source, out, options)
    stream = settle(source, options, "keep")
    (out / "slices").mkdir(parents=True)
    rows: list[SliceInfo] = []
    for index, part in enumerate(slices_of(stream, options.slice_bytes, options.shard_tokens)):
        name = f"slices/{index:06d}.safetensors"
        size, sha256 = write_token_slice(out / name, part.tokens, part.ends)
        rows.append(SliceInfo(index, name, size, sha256, len(part.tokens), len(part.ends)))
    files = _copy_files(source, out)
    table = SliceTable.from_rows(rows)
    atomic_write(out / TABLE_FILE, table.to_parquet())
    atomic_write(out / MANIFEST_FILE, _manifest(stream, options, out, table, files).to_json())
    paths = (*(Path(row.name) for row in rows), *map(Path, files), Path(TABLE_FILE), Path(MANIFEST_FILE))
    return stream.written(paths)


def _manifest(stream: Stream, options: Options, out: Path, table: SliceTable, files: dict[str, str]) -> Manifest:
    facts = stream.source.facts
    eos_id = options.eos_id if options.eos_id is not None else facts.get("eos_id")
    vocab_size = int(facts.get("vocab_size", 0))
    came: dict[str, Any] = {"format": stream.source.kind, **{key: facts[key] for key in ("name", "id") if key in facts}}
    return Manifest.of(
        table,
        {"converted": came, "files": files},
        name=options.name or str(facts.get("name", "")) or out.name,
        layout="tokens",
        dtype=stream.dtype,
        tokenizer=str(facts.get("tokenizer", "")),
        vocab_size=vocab_size if stream.dtype == "U32" or vocab_size <= 1 << 16 else 0,
        eos_id=None if eos_id is None or (vocab_size and eos_id >= vocab_size) else eos_id,
    )


def _copy_files(source: TokenSource, out: Path) -> dict[str, str]:
    """The tokenizer of a dataset of ours goes with its tokens."""
    dataset = source.dataset
    if dataset is None:
        return {}
    listed = listed_files(dataset.manifest)
    copied = {}
    for name in _COPIED:
        if name in listed and (dataset.path / name).is_file():
            shutil.copyfile(dataset.path / name, out / name)
            copied[name] = hash_file(out / name)
    return copied


def _write_flat(source: TokenSource, out: Path, options: Options) -> Written:
    seq_len = options.seq_len
    stream = settle(source, options, "rows" if seq_len else "keep", whole=seq_len or 1)
    out.mkdir()
    names: list[Path] = []
    most = options.shard_tokens
    if seq_len:
        most = max(1, (most or options.slice_bytes // stream.itemsize) // seq_len) * seq_len
    for part in slices_of(stream, options.slice_bytes, most):
        names.append(Path(f"{options.name or 'tokens'}-{len(names):05d}.safetensors"))
        if seq_len:
            write_rows_slice(out / names[-1], {"input_ids": part.tokens.reshape(-1, seq_len)})
        else:
            write_token_slice(out / names[-1], part.tokens, part.ends)
    return stream.written(names)
