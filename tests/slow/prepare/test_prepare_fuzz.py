"""Preparations of files that were damaged in every way: a dataset or a clear error, in time, and no good text lost.

`FOREBAY_FUZZ_S` is for how long random damage is done (6 s); `FOREBAY_FUZZ_SEED` is where it begins.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from forebay import prepare_dataset
from forebay.errors import ForebayError
from forebay.prepare import PrepareResult, load_recipe
from support import whole
from support.calibration import scaled

FUZZ_S = float(os.environ.get("FOREBAY_FUZZ_S", "6"))
SEED = int(os.environ.get("FOREBAY_FUZZ_SEED", "1"))
TIME_LIMIT_S = 20
TEXTS = [f"{i}. " + text for i, text in enumerate(whole.texts(40, seed=3))]
SETTINGS = {
    "name": "f", "max_error_rate": 1.0, "unicode": {}, "pii": {}, "tokenize": {"tokenizer": "bytes"},
    "dedup": {"exact": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small preparations: their files need not outlive the machine."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


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


def crc(data: bytes) -> int:
    """CRC-32C, masked as TFRecord has it."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 * (value & 1)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def field(number: int, data: bytes) -> bytes:
    size, head = len(data), bytes([number << 3 | 2])
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    return head + bytes([size]) + data


def tfrecord() -> bytes:
    result = b""
    for text in TEXTS[:15]:
        values = field(1, field(1, text.encode()))
        example = field(1, field(1, field(1, b"text") + field(2, values)))
        length = struct.pack("<Q", len(example))
        result += length + struct.pack("<I", crc(length)) + example + struct.pack("<I", crc(example))
    return result


def table(write: Callable[[pa.Table, io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(pa.table({"id": [f"d{i}" for i in range(len(TEXTS))], "text": TEXTS}), file)
    return file.getvalue()


def arrow(data: pa.Table, file: io.BytesIO) -> None:
    with pa.ipc.new_file(file, data.schema) as writer:
        writer.write_table(data, max_chunksize=10)


def warc() -> bytes:
    return b"".join(whole.page(f"http://y.org/{i}", text) for i, text in enumerate(TEXTS))


def wikipedia() -> bytes:
    pages = "".join(
        f"<page><title>P{i}</title><ns>0</ns><id>{i}</id><revision><id>1</id>"
        f"<text xml:space='preserve'>{escape(text)}</text></revision></page>\n"
        for i, text in enumerate(TEXTS)
    )
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">\n{pages}</mediawiki>'.encode()


def posts() -> bytes:
    rows = "".join(
        f'  <row Id="{i}" PostTypeId="1" Score="1" Title="T{i}" Body="&lt;p&gt;{escape(text, True)}&lt;/p&gt;" />\n'
        for i, text in enumerate(TEXTS)
    )
    return f'<?xml version="1.0" encoding="utf-8"?>\n<posts>\n{rows}</posts>'.encode()


FILES: dict[str, Callable[[], bytes]] = {
    "x.jsonl": jsonl,
    "x.csv": csv,
    "x.json": lambda: json.dumps([{"text": text} for text in TEXTS]).encode(),
    "x.txt": lambda: "\n".join(TEXTS).encode(),
    "x.html": lambda: ("<html><body>" + "".join(f"<p>{text}</p>" for text in TEXTS) + "</body></html>").encode(),
    "x.tar": tar,
    "x.tfrecord": tfrecord,
    "x.parquet": lambda: table(lambda t, f: pq.write_table(t, f, row_group_size=10, compression="zstd")),
    "x.arrow": lambda: table(arrow),
    "x.warc": warc,
    "x.warc.gz": lambda: b"".join(gzip.compress(whole.page(f"http://y/{i}", t)) for i, t in enumerate(TEXTS)),
    "x.xml": wikipedia,
    "Posts.xml": posts,
}
PACKERS: dict[str, Callable[[bytes], bytes]] = {
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
    began = time.monotonic()
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
    finally:
        assert time.monotonic() - began < scaled(TIME_LIMIT_S), f"{folder} took too long"


def kept(out: Path) -> set[str]:
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
        assert reported or {f"good-{i}" for i in range(5)} <= kept(tmp_path / f"{seed}.d"), f"{seed}: {result}"
        done += 1
        if done > 20 and time.monotonic() > deadline:
            break
    print(f"{done} files, up to seed {seed}")


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.tar", "x.tfrecord", "x.warc", "x.warc.gz"])
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
    total = 15 if name == "x.tfrecord" else len(TEXTS)
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
    assert {"before", "after", "in"} <= kept(tmp_path / "d") and "long" not in kept(tmp_path / "d")
    reported = (tmp_path / "d/rejects.jsonl").read_text()
    assert "a bomb" in reported and "max_document_bytes" in reported and len(reported) < 100_000


def test_the_command_speaks_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(100))
    arguments = ["prepare", tmp_path / "x.parquet", "--out", tmp_path / "d", "--tokenizer", "bytes"]
    done = subprocess.run([sys.executable, "-m", "forebay", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "x.parquet" in done.stderr
