"""Preparations of files that were damaged in every way: a dataset or a clear error, in time, and no good text lost.

`FOREBAY_FUZZ_S` is for how long random damage is done (6 s); `FOREBAY_FUZZ_SEED` is where it begins.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from forebay import prepare_dataset
from forebay.errors import ForebayError
from forebay.prepare import PrepareResult, load_recipe
from support import whole

FUZZ_S = float(os.environ.get("FOREBAY_FUZZ_S", "6"))
SEED = int(os.environ.get("FOREBAY_FUZZ_SEED", "1"))
TEXTS = [f"{i}. " + text for i, text in enumerate(whole.texts(40, seed=3))]
SETTINGS = {
    "name": "f", "max_error_rate": 1.0, "unicode": {}, "pii": {}, "tokenize": {"tokenizer": "bytes"},
    "dedup": {"exact": True},
}  # fmt: skip


def jsonl() -> bytes:
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv() -> bytes:
    return ("id,text\n" + "".join(f'd{i},"{text}"\n' for i, text in enumerate(TEXTS))).encode()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i, text in enumerate(TEXTS):
            info = tarfile.TarInfo(f"d{i}.txt")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return file.getvalue()


def parquet() -> bytes:
    file = io.BytesIO()
    table = pa.table({"id": [f"d{i}" for i in range(len(TEXTS))], "text": TEXTS})
    pq.write_table(table, file, row_group_size=10, compression="zstd")
    return file.getvalue()


def warc() -> bytes:
    return b"".join(whole.page(f"http://y.org/{i}", text) for i, text in enumerate(TEXTS))


FILES = {
    "x.jsonl": jsonl,
    "x.csv": csv,
    "x.txt": lambda: "\n".join(TEXTS).encode(),
    "x.html": lambda: ("<html><body>" + "".join(f"<p>{text}</p>" for text in TEXTS) + "</body></html>").encode(),
    "x.tar": tar,
    "x.parquet": parquet,
    "x.warc": warc,
    "x.warc.gz": lambda: b"".join(gzip.compress(whole.page(f"http://y/{i}", t)) for i, t in enumerate(TEXTS)),
}
PACKERS = {
    "": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
}  # fmt: skip


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The data after one to three accidents."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        index, length = rng.randrange(len(out) + 1), rng.choice([1, 4, 100, 5000])
        match rng.randrange(8):
            case 0:
                del out[index:]
            case 1:
                for _ in range(rng.choice([1, 5, 50]) if out else 0):
                    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
            case 2:
                out[index:index] = bytes(length)
            case 3:
                out[index:index] = rng.choice(
                    [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]
                ) * rng.randint(1, 9)
            case 4:
                other = rng.randrange(len(out) + 1)
                block = bytes(out[index : index + length])
                out[index : index + length] = out[other : other + length]
                out[other : other + length] = block
            case 5:
                del out[index : index + length]
            case 6:
                out[index : index + length] = rng.randbytes(min(length, 200))
            case _:
                out += out[index : index + length] * 3
    return bytes(out)


def attempt(folder: Path, out: Path, **settings: object) -> PrepareResult | ForebayError:
    """A dataset or a clear error, in time; nothing else gets through."""
    try:
        return prepare_dataset(
            [folder],
            out,
            recipe=load_recipe(settings={**SETTINGS, **settings}),
            workers=1,
            write_ids=Path(f"{out}.ids"),
        )
    except ForebayError as error:
        return error


def output_ids(out: Path) -> set[str]:
    return set(Path(f"{out}.ids").read_text().splitlines())


def cases() -> Iterator[tuple[int, str, str]]:
    names = [(name, packed) for name in FILES for packed in PACKERS if not packed or not name.endswith(".gz")]
    for seed in range(SEED, 1 << 60):
        yield seed, *names[seed % len(names)]


def test_random_damage(tmp_path: Path) -> None:
    created = {name: make() for name, make in FILES.items()}
    deadline, done = time.monotonic() + FUZZ_S, 0
    for seed, name, packed in cases():
        rng = random.Random(seed)
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        data = created[name]
        if rng.random() < 0.5:
            data = PACKERS[packed](damaged(data, rng))
        else:
            data = damaged(PACKERS[packed](data), rng)
        (folder / f"{name}{packed}").write_bytes(data)
        (folder / "good.jsonl").write_text("".join(f'{{"id": "good-{i}", "text": "good {i}"}}\n' for i in range(5)))
        try:
            result = attempt(folder, tmp_path / f"{seed}.d")
        except BaseException:
            print(f"FOREBAY_FUZZ_SEED={seed}: {name}{packed}")
            raise
        reported = isinstance(result, ForebayError) and name in str(result)
        assert reported or {f"good-{i}" for i in range(5)} <= output_ids(tmp_path / f"{seed}.d"), f"{seed}: {result}"
        done += 1
        if done > 20 and time.monotonic() > deadline:
            break
    print(f"{done} files, up to seed {seed}")


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.tar", "x.warc", "x.warc.gz"])
def test_what_stands_after_damage_is_kept(tmp_path: Path, name: str) -> None:
    data = bytearray(FILES[name]())
    folder = tmp_path / "in"
    folder.mkdir()
    begin = len(data) // 2
    data[begin : begin + 40] = bytes(40) if name != "x.csv" else b"\xff" * 40
    (folder / name).write_bytes(data)
    result = attempt(folder, tmp_path / "d", unicode=False, pii=False, dedup={})
    assert isinstance(result, PrepareResult)
    texts = b"".join(slice_tokens(tmp_path / "d"))
    numbers = {int(n) for n in re.findall(rb"(?:^|\x00|\n|>|\xff)(\d+)\. ", texts)}
    total = len(TEXTS)
    assert len(numbers & set(range(total))) >= total - 2 and {0, total - 1} <= numbers


def slice_tokens(out: Path) -> Iterator[bytes]:
    """The texts of a dataset of bytes; a line end after each."""
    from forebay.dataset.reader import open_dataset

    dataset = open_dataset(out)
    for index in range(dataset.num_slices):
        tokens = dataset.open_slice(index).tokens
        yield bytes(10 if token == 256 else int(token) for token in tokens)


def test_a_bomb_and_a_long_line(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i, pack in enumerate([gzip.compress, zstandard.compress, lzma.compress, bz2.compress]):
        nest = pack(pack(jsonl()))
        (folder / f"nest{i}.jsonl.gz").write_bytes(nest)
    line = b'{"id": "long", "text": "' + b"word " * (20 << 20) + b'"}\n'
    good = b'{"id": "%s", "text": "some text"}\n'
    (folder / "long.jsonl").write_bytes(good % b"before" + line + good % b"after")
    (folder / "long.txt").write_bytes(b"x" * (100 << 20))
    (folder / "bomb.jsonl.zst").write_bytes(zstandard.compress(good % b"in" + b" " * (1200 << 20)))
    result = attempt(folder, tmp_path / "d", dedup={})
    assert isinstance(result, PrepareResult)
    assert {"before", "after", "in"} <= output_ids(tmp_path / "d") and "long" not in output_ids(tmp_path / "d")
    reported = (tmp_path / "d/rejects.jsonl").read_text()
    assert "a bomb" in reported and "max_document_bytes" in reported and len(reported) < 100_000
