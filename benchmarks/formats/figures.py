"""The same documents in each format: read in order, one read at random, size.

Text formats are read by the readers that `prepare` uses, and give text, which is yet to be tokenized; MDS,
Megatron and slices give tokens, read by the readers that the loader uses. Every speed is in megabytes of the corpus's
text a second, so that they compare. For a document at random a format that has no index of its own (JSONL, tar,
TFRecord) gets one, made by one pass, which is a column of its own. Files lie in the page cache: what is compared is
formats, not disks.
"""

from __future__ import annotations

import io
import json
import mmap
import shutil
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import write_token_slice
from forebay.errors import UsageError
from forebay.formats import open_external

_WORDS = 20_000
_WORDS_A_DOCUMENT = 200
_SLICE_TOKENS = 1 << 20
_ROWS_A_GROUP = 1000
_MASK = 0xA282EAD8

Get = Callable[[int], Any]


@dataclass(frozen=True)
class Corpus:
    """Documents as text, and as tokens: one a word, so that no tokenizer's taste is in the figures."""

    texts: list[str]
    tokens: NDArray[np.uint16]
    document_ends: NDArray[np.uint64]  # Of documents, exclusive.

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class FormatFigures:
    """Of one format. `_s` are seconds, None where it was not measured; `note` says why, or what it gives.

    Attributes:
        file_bytes: All its files.
        parse_mb_per_s: Reading all documents in order, in megabytes of text: the best of the rounds.
        index_s: Making what a document at random needs; 0 where the format has it.
        random_p50_s, random_p99_s: One document at random.
    """

    name: str
    file_bytes: int = 0
    parse_mb_per_s: float | None = None
    index_s: float | None = None
    random_p50_s: float | None = None
    random_p99_s: float | None = None
    gives: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values, by name."""
        return asdict(self)


@dataclass(frozen=True)
class _Kind:
    name: str
    write: Callable[[Corpus, Path], object]
    index: Callable[[Path], Get]
    read: Callable[[Path], int] | None = None  # By default prepare's reader; how many documents.
    needs: str = ""
    gives: str = "text"


def make_corpus(num_bytes: int, seed: int = 0) -> Corpus:
    """About so many bytes of text: words of 2 to 9 letters, Zipf's law, documents of some 200 words."""
    chance = np.random.default_rng(seed)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", "S1")
    words = [b"".join(chance.choice(letters, n)).decode() for n in chance.integers(2, 10, _WORDS)]
    mean = 6.5  # Letters of a word, and a space.
    num_tokens = max(_WORDS_A_DOCUMENT, int(num_bytes / mean))
    tokens = np.minimum(chance.zipf(1.2, num_tokens) - 1, _WORDS - 1).astype(np.uint16)
    lengths = np.maximum(1, chance.exponential(_WORDS_A_DOCUMENT, 2 + 2 * num_tokens // _WORDS_A_DOCUMENT)).astype(
        np.int64
    )
    drawn = np.cumsum(lengths)
    document_ends = np.append(drawn[drawn < num_tokens], num_tokens).astype(np.uint64)
    bounds = np.concatenate([[0], document_ends]).astype(np.int64).tolist()
    texts = [" ".join([words[t] for t in tokens[a:b]]) for a, b in zip(bounds, bounds[1:])]  # noqa: RUF007 - a list's slices
    return Corpus(texts, tokens, document_ends)


def bench_formats(
    folder: Path,
    num_bytes: int = 20_000_000,
    *,
    samples: int = 500,
    rounds: int = 3,
    only: Sequence[str] = (),
) -> list[FormatFigures]:
    """Write the corpus in each format below `folder`, and measure; some seconds for 20 MB.

    Args:
        samples: Documents read at random.
        rounds: Of reading in order; they go from format to format, so that a slow moment meets all.
        only: Names of formats; by default all.

    Raises:
        UsageError: If one of them is not known.
    """
    unknown = sorted(set(only) - set(FORMATS))
    if unknown:
        raise UsageError(f"formats: expected some of {', '.join(FORMATS)}, got {', '.join(unknown)}.")
    corpus = make_corpus(num_bytes)
    kinds = [kind for kind in _KINDS if not only or kind.name in only]
    results: dict[str, FormatFigures] = {}
    best: dict[str, float] = {}
    usable = []
    for kind in kinds:
        path = folder / kind.name
        path.mkdir(parents=True)
        try:
            kind.write(corpus, path)
        except ImportError:
            results[kind.name] = FormatFigures(kind.name, gives=f"not measured: {kind.needs} is not installed")
            continue
        except Exception as error:
            if not kind.needs:  # Else another's package, which does not work here.
                raise
            results[kind.name] = FormatFigures(kind.name, gives=f"not measured: {kind.needs}: {error}")
            continue
        usable.append(kind)
    for _ in range(rounds):
        for kind in usable:
            began = time.perf_counter()
            number = (kind.read or _read_by_prepare)(folder / kind.name)
            best[kind.name] = min(best.get(kind.name, 1e9), time.perf_counter() - began)
            assert number == len(corpus.texts), f"{kind.name}: {number} of {len(corpus.texts)} documents"
    numbers = np.random.default_rng(1).integers(0, len(corpus.texts), samples).tolist()
    for kind in usable:
        path = folder / kind.name
        began = time.perf_counter()
        get = kind.index(path)
        index_s = time.perf_counter() - began
        spent = np.percentile(_seconds(get, numbers), [50, 99])
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        results[kind.name] = FormatFigures(
            kind.name,
            size,
            corpus.num_bytes / best[kind.name] / 1e6,
            index_s,
            float(spent[0]),
            float(spent[1]),
            kind.gives,
        )
    return [results[kind.name] for kind in kinds]


def table(figures: Sequence[FormatFigures], text_bytes: int) -> str:
    """The figures as a table."""
    lines = [
        f"{'format':<16}{'size':>10}{'of text':>9}{'read MB/s':>11}{'index ms':>10}{'p50 us':>9}{'p99 us':>9}  gives"
    ]
    for figure in figures:
        if (
            figure.parse_mb_per_s is None
            or figure.index_s is None
            or figure.random_p50_s is None
            or figure.random_p99_s is None
        ):
            lines.append(f"{figure.name:<16}{figure.gives}")
            continue
        size = f"{figure.file_bytes / 1e6:>7.1f} MB{figure.file_bytes / text_bytes:>9.2f}"
        times = f"{figure.index_s * 1e3:>10.1f}{figure.random_p50_s * 1e6:>9.1f}{figure.random_p99_s * 1e6:>9.1f}"
        lines.append(f"{figure.name:<16}{size}{figure.parse_mb_per_s:>11,.0f}{times}  {figure.gives}")
    return "\n".join(lines)


def _seconds(get: Get, asked: Sequence[int]) -> list[float]:
    spent = []
    for number in asked:
        began = time.perf_counter()
        get(number)
        spent.append(time.perf_counter() - began)
    return spent


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_by_prepare(path: Path) -> int:
    from forebay.formats.inputs import ReadOptions
    from forebay.prepare.inputs import find_inputs, read_split, split_files

    options = ReadOptions()
    inputs = find_inputs(path, options)
    return sum(
        1 for piece in split_files(inputs.files, options) for record in read_split(piece, options) if not record.problem
    )


# --- JSONL


def _write_jsonl(corpus: Corpus, path: Path) -> None:
    with (path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in corpus.texts)


def _index_jsonl(path: Path) -> Get:
    import orjson

    data, starts = _map(path / "a.jsonl"), [0]
    while (newline := data.find(b"\n", starts[-1])) >= 0:
        starts.append(newline + 1)
    return lambda number: orjson.loads(data[starts[number] : starts[number + 1]])["text"]


# --- Parquet and Arrow


def _arrow(corpus: Corpus) -> pa.Table:
    return pa.table({"text": corpus.texts})


def _write_parquet(compression: str) -> Callable[[Corpus, Path], object]:
    return lambda corpus, path: pq.write_table(
        _arrow(corpus), path / "a.parquet", compression=compression, row_group_size=_ROWS_A_GROUP
    )


def _index_parquet(path: Path) -> Get:
    file = pq.ParquetFile(path / "a.parquet")

    def get(number: int) -> Any:
        group, row = divmod(number, _ROWS_A_GROUP)
        return file.read_row_group(group, ["text"]).column(0)[row].as_py()

    return get


def _write_arrow(corpus: Corpus, path: Path) -> None:
    with pa.OSFile(str(path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, _arrow(corpus).schema) as writer:
        writer.write_table(_arrow(corpus), max_chunksize=_ROWS_A_GROUP)


def _index_arrow(path: Path) -> Get:
    column = pa.ipc.open_file(pa.memory_map(str(path / "a.arrow"))).read_all().column(0)
    return lambda number: column[number].as_py()


# --- WebDataset


def _write_tar(corpus: Corpus, path: Path) -> None:
    with tarfile.open(path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, text in enumerate(corpus.texts):
            info = tarfile.TarInfo(f"{number:08d}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))


def _index_tar(path: Path) -> Get:
    with tarfile.open(path / "a.tar") as archive:
        spans = [(member.offset_data, member.offset_data + member.size) for member in archive]
    data = _map(path / "a.tar")
    return lambda number: data[spans[number][0] : spans[number][1]].decode()


# --- TFRecord


def _write_tfrecord(corpus: Corpus, path: Path) -> None:
    import google_crc32c

    def masked(data: bytes) -> bytes:
        crc = int(google_crc32c.value(data))
        return (((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF).to_bytes(4, "little")

    with (path / "a.tfrecord").open("wb") as file:
        for text in corpus.texts:
            # Example{1: Features{1: {1: "text", 2: Feature{1: BytesList{1: text}}}}}
            feature = _field(2, _field(1, _field(1, text.encode())))
            data = _field(1, _field(1, _field(1, b"text") + feature))
            head = len(data).to_bytes(8, "little")
            file.write(head + masked(head) + data + masked(data))


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    size, head = len(data), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size]) + data


def _index_tfrecord(path: Path) -> Get:
    from forebay.formats.tfrecord import parse_example

    data, spans, offset = _map(path / "a.tfrecord"), [], 0
    while offset < len(data):
        stop = offset + 12 + int.from_bytes(data[offset : offset + 8], "little")
        spans.append((offset + 12, stop))
        offset = stop + 4
    return lambda number: parse_example(data[spans[number][0] : spans[number][1]])["text"]


# --- Slices


def _write_slices(corpus: Corpus, path: Path) -> None:
    document_ends = corpus.document_ends.astype(np.int64)
    start = first = 0
    for index in range(max(1, -(-len(corpus.tokens) // _SLICE_TOKENS))):
        last = int(np.searchsorted(document_ends, (index + 1) * _SLICE_TOKENS, "right"))
        last = max(first + 1, last) if (index + 1) * _SLICE_TOKENS < len(corpus.tokens) else len(document_ends)
        stop = int(document_ends[last - 1])
        write_token_slice(
            path / f"{index:06d}.safetensors",
            corpus.tokens[start:stop],
            (document_ends[first:last] - start).astype(np.uint64),
        )
        start, first = stop, last
    import_slices(path, "corpus")


def _write_others(to: str) -> Callable[[Corpus, Path], object]:
    """The slices, converted by `forebay convert`."""

    def write(corpus: Corpus, path: Path) -> None:
        from forebay.convert import convert
        from forebay.formats.conversion import ConvertOptions

        slices = path / "slices"
        slices.mkdir()
        _write_slices(corpus, slices)
        convert(slices, path / "converted", to, ConvertOptions())
        shutil.rmtree(slices)

    return write


def _open_tokens(path: Path) -> Dataset:
    converted = open_external(path / "converted") if (path / "converted").exists() else None
    return converted or open_dataset(path)


def _index_tokens(path: Path) -> Get:
    dataset = _open_tokens(path)
    firsts = np.cumsum(dataset.table.documents) - dataset.table.documents
    slices = [dataset.open_slice(index) for index in range(dataset.num_slices)]

    def get(number: int) -> Any:
        index = int(np.searchsorted(firsts, number, "right")) - 1
        data, document = slices[index], number - int(firsts[index])
        start = int(data.document_ends[document - 1]) if document else 0
        return data.tokens[start : int(data.document_ends[document])].astype(np.int64)

    return get


def _read_tokens(path: Path) -> int:
    dataset, number = _open_tokens(path), 0
    for index in range(dataset.num_slices):
        data = dataset.open_slice(index)
        start = 0
        for end in data.document_ends.tolist():
            data.tokens[start:end].astype(np.int64)
            start, number = end, number + 1
    return number


_KINDS = (
    _Kind("jsonl", _write_jsonl, _index_jsonl),
    _Kind("parquet-snappy", _write_parquet("snappy"), _index_parquet),
    _Kind("parquet-zstd", _write_parquet("zstd"), _index_parquet),
    _Kind("arrow", _write_arrow, _index_arrow),
    _Kind("webdataset", _write_tar, _index_tar),
    _Kind("tfrecord", _write_tfrecord, _index_tfrecord, needs="google-crc32c"),
    _Kind("megatron", _write_others("megatron"), _index_tokens, _read_tokens, gives="tokens"),
    _Kind("slices", _write_slices, _index_tokens, _read_tokens, gives="tokens"),
)
FORMATS = tuple(kind.name for kind in _KINDS)
