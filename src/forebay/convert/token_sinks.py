"""Where tokens are written: one function a format, by its name, in `TOKEN_SINKS`.

Hides: the layout of each format (`formats` reads them), its indexes, and how a stream is cut into files. In memory are
a piece of 4 Mi tokens, of MDS and LitData a shard of `slice_bytes`, and of Megatron's index a run: the lengths of its
documents are kept in a file. Formats whose integers are signed hold U32 as int32, a type that every framework has.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import zstandard
from numpy.typing import NDArray

from forebay.convert.content import Options, TokenSource, Written
from forebay.convert.streams import Stream, settle, shards_of, slices_of
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, TOKEN_DTYPES, Manifest, SliceInfo, SliceTable
from forebay.dataset.reader import listed_files
from forebay.dataset.slices import hash_file, write_token_slice
from forebay.errors import UsageError
from forebay.files import atomic_write
from forebay.formats.detect import MEGATRON_MAGIC
from forebay.formats.shard_writer import write_unlisted

Sink = Callable[[TokenSource, Path, Options], Written]

_TOKENIZER_FILE = "tokenizer.json"
_LLMC = {"U16": (20240520, 1), "U32": (20240801, 7)}  # What the 256 int32 of the header begin with: magic and version.
_SEQ_LEN = 2048
_CODES = {"U16": 8, "U32": 4}  # uint16, int32.
_MOST_LENGTH = (1 << 31) - 1
_RUN = 1 << 18
_ROWS = 1000  # Of a record batch, as `datasets` writes them.
_MOST_BYTES = (1 << 32) - 1
_RECORD_BYTES = 4 + 4 + 9  # Of MDS: an offset, a size, a shape of at most 8 bytes and the byte that tells it.
_MDS_LEVEL, _LITDATA_LEVEL = 3, 4
_FORMATS = {"U16": "no_header_numpy:5", "U32": "no_header_tensor:16"}  # uint16; int32.
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def write_safetensors(source: TokenSource, out: Path, options: Options) -> Written:
    """A dataset of layout `tokens`."""
    stream = settle(source, options, "keep")
    (out / "slices").mkdir(parents=True)
    rows: list[SliceInfo] = []
    for index, part in enumerate(slices_of(stream, options.slice_bytes, options.shard_tokens)):
        name = f"slices/{index:06d}.safetensors"
        size, sha256 = write_token_slice(out / name, part.tokens, part.ends)
        rows.append(SliceInfo(index, name, size, sha256, len(part.tokens), len(part.ends)))
    files = _copy_tokenizer(source, out)
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


def _copy_tokenizer(source: TokenSource, out: Path) -> dict[str, str]:
    """The tokenizer of a dataset of ours goes with its tokens: its hash by its name."""
    dataset = source.dataset
    if dataset is None or _TOKENIZER_FILE not in listed_files(dataset.manifest):
        return {}
    if not (dataset.path / _TOKENIZER_FILE).is_file():
        return {}
    shutil.copyfile(dataset.path / _TOKENIZER_FILE, out / _TOKENIZER_FILE)
    return {_TOKENIZER_FILE: hash_file(out / _TOKENIZER_FILE)}


def write_bin(source: TokenSource, out: Path, options: Options, suffix: str = ".bin") -> Written:
    """Headerless little-endian tokens, as nanoGPT has them; with `more["header"]`, llm.c's header before them.

    One file where `out` ends so; else a directory with `<name>.bin`, or `<name>_000000.bin` … of `shard_tokens`.
    """
    stream = settle(source, options, "none")
    per_file, left, room = options.shard_tokens or max(1, stream.num_tokens), stream.num_tokens, 0
    has_header = bool(options.more.get("header")) and suffix == ".bin"
    if has_header and min(per_file, left) > _MOST_LENGTH:
        raise UsageError(
            f"bin: expected at most {_MOST_LENGTH} tokens in a file with llm.c's header, got {left}. "
            "Give --shard-tokens 100000000."
        )
    is_file = out.suffix == suffix
    if is_file and per_file < left:
        raise UsageError(f"{out.name}: expected a directory for files of --shard-tokens {per_file}, got one file.")
    if not is_file:
        out.mkdir()
    name, files = options.name or "train", list[Path]()
    with ExitStack() as opened:
        for part in stream.parts():
            tokens = part.tokens
            while len(tokens):
                if not room:
                    opened.close()
                    room = min(per_file, left)
                    files.append(
                        Path(f"{name}_{len(files):06d}{suffix}" if options.shard_tokens else f"{name}{suffix}")
                    )
                    file = opened.enter_context((out if is_file else out / files[-1]).open("wb"))
                    file.write(
                        np.array([*_LLMC[stream.dtype], room] + [0] * 253, "<i4").tobytes() if has_header else b""
                    )
                some, tokens = tokens[:room], tokens[room:]
                room, left = room - len(some), left - len(some)
                file.write(np.ascontiguousarray(some).view(np.uint8).data)
    return stream.written([Path()] if is_file else files)


def write_npy(source: TokenSource, out: Path, options: Options) -> Written:
    """Templar's shards: `train_%06d.npy` with NumPy's header, and the id of each sample of `seq_len` (2048) tokens.

    With `more["generation"]` `npy` (the default) the ids are `sample_ids_%06d.npy`, with `bin` raw `.bin`.
    """
    seq_len = options.seq_len or source.seq_len or _SEQ_LEN
    stream = settle(source, options, "none", whole=seq_len)
    if not stream.num_tokens:
        raise UsageError(f"npy: expected at least one sample of {seq_len} tokens, got {source.num_tokens} tokens.")
    per_file = options.shard_tokens or stream.num_tokens
    if per_file % seq_len:
        raise UsageError(f"npy: expected shards of whole samples of {seq_len} tokens, got --shard-tokens {per_file}.")
    out.mkdir()
    tokens = (part.tokens for part in stream.parts())
    generation = options.more.get("generation", "npy")
    shards = write_unlisted(tokens, out, seq_len, per_file // seq_len, TOKEN_DTYPES[stream.dtype], generation)
    stream.notes.append(f"samples of {seq_len} tokens")
    files = [Path(path.name) for shard in shards for path in (shard.tokens, shard.ids)]
    return stream.written(files, stream.num_tokens // seq_len)


def write_megatron(source: TokenSource, out: Path, options: Options) -> Written:
    """A pair of files in a new directory. Tokens of U32 are written as int32."""
    stream = settle(source, options, "rows", signed=True)
    out.mkdir()
    base = f"{options.name or 'dataset'}_text_document"
    data, idx, lengths = (out / f"{base}{suffix}" for suffix in (".bin", ".idx", ".lengths"))
    before = reached = count = 0
    with data.open("wb") as tokens, lengths.open("wb") as sizes:
        for part in stream.parts():
            tokens.write(np.ascontiguousarray(part.tokens).view(np.uint8).data)
            ends = part.ends.astype(np.int64) + reached
            found = np.diff(ends, prepend=before)
            if len(found) and int(found.max()) > _MOST_LENGTH:
                raise UsageError(
                    f"megatron: expected documents of at most {_MOST_LENGTH} tokens, got one of {int(found.max())}. "
                    "Give --seq-len N, or --eos-id N if a token ends each."
                )
            sizes.write(found.astype("<i4").tobytes())
            before = int(ends[-1]) if len(ends) else before
            reached += len(part.tokens)
            count += len(ends)
    with lengths.open("rb") as sizes, idx.open("wb") as index:
        index.write(MEGATRON_MAGIC + (1).to_bytes(8, "little") + bytes([_CODES[stream.dtype]]))
        index.write(count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little"))
        _write_columns(index, sizes, count, stream.itemsize)
    lengths.unlink()
    return stream.written([Path(data.name), Path(idx.name)])


def _write_columns(index: BinaryIO, lengths: BinaryIO, count: int, itemsize: int) -> None:
    """Lengths, pointers and document bounds."""
    for _ in range(0, count, _RUN):
        index.write(lengths.read(4 * _RUN))
    lengths.seek(0)
    pointer = 0
    for _ in range(0, count, _RUN):
        sizes = np.frombuffer(lengths.read(4 * _RUN), "<i4").astype(np.int64) * itemsize
        stops = np.cumsum(sizes) + pointer
        index.write((stops - sizes).astype("<i8").tobytes())
        pointer = int(stops[-1])
    for start in range(0, count + 1, _RUN):
        index.write(np.arange(start, min(start + _RUN, count + 1), dtype="<i8").tobytes())


def write_arrow(source: TokenSource, out: Path, options: Options) -> Written:
    """Files of at most `slice_bytes`, or of `shard_tokens`."""
    stream = settle(source, options, "rows", signed=True)
    kind, name = ("uint16" if stream.dtype == "U16" else "int32"), options.column or "input_ids"
    features = {name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "Sequence"}}
    schema = pa.schema(
        [pa.field(name, pa.list_(pa.type_for_alias(kind)))],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    out.mkdir()
    written: list[Path] = []
    for group in shards_of(stream, options.slice_bytes, 4, options.shard_tokens):
        written.append(out / f"{len(written):05d}.arrow")
        with pa.OSFile(str(written[-1]), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(0, len(group), _ROWS):
                writer.write_batch(_batch(group[start : start + _ROWS], schema))
    names = [f"data-{i:05d}-of-{len(written):05d}.arrow" for i in range(len(written))]
    for path, final in zip(written, names):
        path.rename(out / final)
    state: dict[str, Any] = {
        "_data_files": [{"filename": final} for final in names],
        "_fingerprint": stream.digest.tokens[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (out / "dataset_info.json").write_text(json.dumps(info, indent=2))
    (out / "state.json").write_text(json.dumps(state, indent=2))
    paths = (*map(Path, names), Path("dataset_info.json"), Path("state.json"))
    return stream.written(paths, stream.num_documents)


def _batch(group: list[NDArray[Any]], schema: Any) -> Any:
    offsets = np.cumsum([0, *map(len, group)], dtype=np.int64)
    if int(offsets[-1]) > _MOST_LENGTH:
        raise UsageError(
            f"arrow: expected at most {_MOST_LENGTH} tokens in {len(group)} rows, got {int(offsets[-1])}. Give "
            "--seq-len N."
        )
    kind = schema.field(0).type
    values = np.concatenate(group)
    flat = pa.array(values if kind.value_type == pa.uint16() else values.view(np.int32))
    return pa.record_batch(
        [pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat, type=kind)], schema=schema
    )


def write_mds(source: TokenSource, out: Path, options: Options) -> Written:
    """`index.json` and `shard.00000.mds` …, or `.mds.zstd`; the index has the sha256 of each file."""
    stream = settle(source, options, "rows")
    kind = "uint16" if stream.dtype == "U16" else "uint32"
    seq_len = stream.seq_len if stream.seq_len and stream.num_tokens % stream.seq_len == 0 else None
    column = options.column or "tokens"
    settings: dict[str, Any] = {
        "column_encodings": [f"ndarray:{kind}:{seq_len}" if seq_len else f"ndarray:{kind}"],
        "column_names": [column],
        "column_sizes": [seq_len * stream.itemsize if seq_len else None],
        "compression": f"zstd:{_MDS_LEVEL}" if options.compress else None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": options.slice_bytes,
        "version": 2,
    }
    head = json.dumps(settings, sort_keys=True).encode()
    out.mkdir()
    shards: list[dict[str, Any]] = []
    names: list[Path] = []
    for group in shards_of(stream, options.slice_bytes - len(head) - 8, _RECORD_BYTES, options.shard_tokens):
        raw, name = _block("mds", [_sample(tokens, seq_len) for tokens in group], head), f"shard.{len(shards):05d}.mds"
        zipped = zstandard.ZstdCompressor(level=_MDS_LEVEL).compress(raw) if options.compress else None
        stored = name if zipped is None else f"{name}.zstd"
        (out / stored).write_bytes(raw if zipped is None else zipped)
        names.append(Path(stored))
        shards.append(
            {
                **settings,
                "samples": len(group),
                "raw_data": _entry(name, raw),
                "zip_data": None if zipped is None else _entry(stored, zipped),
            }
        )
    (out / "index.json").write_text(json.dumps({"shards": shards, "version": 2}, sort_keys=True))
    return stream.written([*names, Path("index.json")], stream.num_documents)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"basename": name, "bytes": len(data), "hashes": {"sha256": hashlib.sha256(data).hexdigest()}}


def _sample(tokens: NDArray[Any], seq_len: int | None) -> bytes:
    """The values; where their number is not fixed, after their size and shape: one dimension, in the fewest bytes."""
    if seq_len is not None:
        return tokens.tobytes()
    code = 0 if len(tokens) < 1 << 8 else 1 if len(tokens) < 1 << 16 else 2
    return _sized(bytes([1 << 2 | code]) + len(tokens).to_bytes(1 << code, "little") + tokens.tobytes())


def write_litdata(source: TokenSource, out: Path, options: Options) -> Written:
    """Chunks of at most `slice_bytes`, or of `shard_tokens`; compressed whole where `compress` says."""
    stream = settle(source, options, "rows", signed=True)
    items = options.more.get("items", "tokens")
    if items not in ("tokens", "dict", "tuple"):
        raise UsageError(f"litdata: expected items 'tokens', 'dict' or 'tuple', got {items!r}.")
    out.mkdir()
    chunks: list[dict[str, Any]] = []
    names: list[Path] = []
    for group in shards_of(stream, options.slice_bytes - 8, 8, options.shard_tokens):
        values = [tokens.tobytes() for tokens in group]
        raw = _block("litdata", values if items == "tokens" else list(map(_sized, values)))
        name = f"chunk-0-{len(chunks)}.{'zstd.' if options.compress else ''}bin"
        stored = zstandard.ZstdCompressor(level=_LITDATA_LEVEL).compress(raw) if options.compress else raw
        (out / name).write_bytes(stored)
        names.append(Path(name))
        dim = sum(map(len, group)) if items == "tokens" else None
        chunks.append({"chunk_bytes": len(raw), "chunk_size": len(group), "dim": dim, "filename": name})
    index = {
        "chunks": chunks,
        "config": _config(stream, options, items),
        # Readers keep their caches by it: a number made of what was written.
        "updated_at": str(int(stream.digest.tokens[:12], 16)),
    }
    (out / "index.json").write_text(json.dumps(index, sort_keys=True))
    return stream.written([*names, Path("index.json")], stream.num_documents)


def _config(stream: Stream, options: Options, items: str) -> dict[str, Any]:
    spec: dict[str, Any] = _LEAF
    if items != "tokens":
        keys = json.dumps([options.column or "input_ids"]) if items == "dict" else "null"
        spec = {"type": f"builtins.{items}", "context": keys, "children_spec": [_LEAF]}
    return {
        "chunk_bytes": None if options.shard_tokens else options.slice_bytes,
        "chunk_size": options.shard_tokens,
        "compression": "zstd" if options.compress else None,
        "data_format": [_FORMATS[stream.dtype]],
        "data_spec": json.dumps([1, spec]),
        "encryption": None,
        "item_loader": "TokensLoader" if items == "tokens" else "PyTreeLoader",
    }


def _sized(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


def _block(what: str, samples: list[bytes], settings: bytes = b"") -> bytes:
    """The raw bytes of a shard: how many samples, where each begins and the last ends, settings, samples."""
    offsets = np.cumsum([4 * (len(samples) + 2) + len(settings), *map(len, samples)], dtype=np.int64)
    if int(offsets[-1]) > _MOST_BYTES:
        raise UsageError(
            f"{what}: expected {'shards' if what == 'mds' else 'chunks'} of at most {_MOST_BYTES} bytes, got "
            f"{int(offsets[-1])}. Give --slice-bytes 64MiB; a document that is larger needs --seq-len N."
        )
    return b"".join([len(samples).to_bytes(4, "little"), offsets.astype("<u4").tobytes(), settings, *samples])


TOKEN_SINKS: Mapping[str, Sink] = {
    "safetensors": write_safetensors,
    "npy": write_npy,
    "bin": write_bin,
    "ds": partial(write_bin, suffix=".ds"),  # As headerless .bin, under Psyche's suffix.
    "megatron": write_megatron,
    "mds": write_mds,
    "litdata": write_litdata,
    "arrow": write_arrow,
}
