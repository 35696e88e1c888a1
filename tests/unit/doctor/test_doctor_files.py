"""Tables, archives, datasets: each fault is made in a real file and found; clean ones have no finding."""

import gzip
import json
import os
import shutil
import struct
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard

from forebay.cli import main
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_rows_slice, write_token_slice
from forebay.formats.tfrecord import crc32c, masked
from support.doctor_cases import EOS, faults, findings, only, reports, text_tokens
from support.foreign_datasets import FOREIGN


def cut(path: Path, num_bytes: int) -> Path:
    os.truncate(path, path.stat().st_size - num_bytes)
    return path


def flip(path: Path, offset: int) -> Path:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)
    return path


def tar(path: Path, samples: int = 4) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for i in range(samples):
            for kind in ("txt", "json"):
                data = f'{{"sample": {i}}}'.encode() * 50
                member = tarfile.TarInfo(f"{i:04d}.{kind}")
                member.size = len(data)
                archive.addfile(member, BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_truncated_tar(tmp_path, name):
    path = tar(tmp_path / name)
    (report,) = reports(path)
    assert report.ok and report.kind == "webdataset"
    assert (report.metadata["samples"], report.metadata["members"]) == (4, 8)
    size = 512 * 3 * 7 + 700 if name == "a.tar" else path.stat().st_size - 60  # Within the last member.
    os.truncate(path, size)
    assert faults(path) == {"truncated"}
    assert reports(path)[0].metadata["samples"] >= 2


def test_a_damaged_header_in_a_tar(tmp_path):
    path = flip(tar(tmp_path / "a.tar"), 512 * 3 * 2 + 10)
    assert only("damaged", path).location == f"byte {512 * 3 * 2}"
    assert reports(path)[0].metadata["members"] == 7


def records(path: Path, num: int = 5) -> Path:
    crc, out = crc32c(), b""
    for i in range(num):
        data, length = bytes([i]) * 100, struct.pack("<Q", 100)
        out += length + struct.pack("<I", masked(crc(length))) + data + struct.pack("<I", masked(crc(data)))
    path.write_bytes(out)
    return path


def test_tfrecord(tmp_path):
    path = records(tmp_path / "a.tfrecord")
    assert reports(path)[0].metadata["records"] == 5 and not findings(path)
    assert only("damaged", flip(path, 116 * 2 + 50)).location == f"byte {116 * 2}"
    assert reports(path)[0].metadata["records"] == 4
    path = cut(records(tmp_path / "b.tfrecord"), 9)
    assert only("truncated", path).location == f"byte {116 * 4}"
    assert reports(path)[0].metadata["records"] == 4


def lines(num: int = 50) -> bytes:
    return b"".join(orjson.dumps({"text": f"line {i} " * 12}) + b"\n" for i in range(num))


@pytest.mark.parametrize(
    "suffix, pack", [("", bytes), (".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)]
)
def test_truncated_jsonl(tmp_path, suffix, pack):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(lines(2000)))
    assert not findings(path) and reports(path)[0].metadata["lines"] == 2000
    cut(path, 10)
    assert "truncated" in faults(path)
    assert 0 < reports(path)[0].metadata["lines"] <= 2000


def test_damaged_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(3) + b'{"text": "broken\n' + b'{"text": "\xff"}\n' + lines(2)[:-1])
    assert [item.location.partition(" (")[0] for item in findings(path)] == ["line 4", "line 5"]


# Tables.


def table(rows: int = 3000) -> pa.Table:
    ids = text_tokens(rows * 8, dtype=np.int64).reshape(rows, 8).tolist()
    return pa.table({"text": [f"row {i}" for i in range(rows)], "input_ids": ids})


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, row_group_size=1000, write_page_checksum=True)
    (report,) = reports(path)
    assert report.ok and report.metadata["rows"] == 3000 and report.metadata["tokens_read"] == 24_000
    assert faults(path, vocab_size=1000) == {"vocabulary-overflow"}
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    flip(path, group.data_page_offset + group.total_compressed_size // 2)
    assert only("damaged", path).location == "row 1000 or after"
    assert only("damaged", cut(path, 100)).advice == "fetch or write it again"


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow(tmp_path, make):
    path = tmp_path / "a.arrow"
    with make(str(path), table().schema) as writer:
        writer.write_table(table(), max_chunksize=1000)
    assert not findings(path) and reports(path)[0].metadata["rows"] == 3000
    cut(path, 40_000)
    assert faults(path) == {"damaged"}
    if make is pa.ipc.new_stream:
        assert reports(path)[0].metadata["rows"] == 2000


# Datasets with an index.


def test_megatron_whose_data_is_truncated(tmp_path):
    folder = Path(shutil.copytree(FOREIGN / "megatron_u16", tmp_path / "m"))
    data = next(folder.glob("*.bin"))
    cut(data, 30)
    assert only("index-mismatch", folder).location == "index"
    with data.open("ab") as file:
        file.write(bytes(100))
    assert faults(folder) == {"index-mismatch"}


def test_mds_whose_shard_is_not_what_its_index_says(tmp_path):
    folder = Path(shutil.copytree(FOREIGN / "mds_raw", tmp_path / "m"))
    shard = sorted(folder.glob("*.mds"))[1]
    flip(shard, shard.stat().st_size - 3)
    assert faults(folder) == {"damaged"}
    cut(shard, 8)
    assert "bytes" in only("index-mismatch", folder).evidence


PNG = b"\x89PNG\r\n\x1a\n\0\0"


@pytest.mark.parametrize(
    "files, ok, shown",
    [
        ({"a.png": PNG}, False, ["NOT checked: 1 of 1"]),
        ({"page.html": b"<!DOCTYPE html><html><body>A page.</body></html>"}, True, ["html: 1", "forebay prepare"]),
        (
            {"a.txt": b"one", "b.md": b"# two", "e.txt": b"", "l.txt": "schöne Grüße".encode("latin-1"), "p.png": PNG},
            True, ["not examined: 5", "text: 4", "images: 1", "empty: 1", "guessed to be ", "5 files were not"],
        ),
        ({"a.jsonl": b'{"text": "a"}\n', "a.txt": b"one", "p.png": PNG}, True, ["lines: 1", "2 files were not"]),
        ({"a.jsonl": b"{broken\n", "a.txt": b"one"}, False, ["WRONG damaged", "text: 1", "NOT ok: 1 of 2"]),
    ],
)  # fmt: skip
def test_what_is_not_examined_is_counted_by_kind_and_texts_are_healthy(files, ok, shown, tmp_path, capsys):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert main(["doctor", str(tmp_path)]) == (not ok)
    printed = capsys.readouterr().out
    assert all(words in printed for words in shown), printed
    assert main(["doctor", str(tmp_path), "--json"]) == (not ok)
    assert orjson.loads(capsys.readouterr().out)["ok"] == ok


def test_a_saved_set_of_text_is_healthy(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"], "id": [1, 2]}).save_to_disk(str(tmp_path / "saved"))
    (report,) = reports(tmp_path / "saved")
    assert report.ok and report.metadata["rows"] == 2 and "forebay prepare" in report.metadata["text"]


# Forebay's own.


def ours(folder: Path) -> Path:
    folder.mkdir()
    for i in range(2):
        tokens = text_tokens(5000, i, vocab=50_000, eos=None)
        tokens[499::500] = EOS
        write_token_slice(folder / f"s{i}.safetensors", tokens, np.arange(500, 5001, 500).astype(np.uint64))
    import_slices(folder)
    return folder


def test_a_dataset_of_ours(tmp_path):
    folder = ours(tmp_path / "d")
    (report,) = reports(folder, vocab_size=50_257)
    assert report.ok and report.kind == "forebay" and report.metadata["tokens"] == 10_000
    flip(folder / "s1.safetensors", -100)
    assert only("damaged", folder).location == "s1.safetensors"
    (folder / "s0.safetensors").unlink()
    assert "is missing" in {item.evidence for item in findings(folder)}
    flip(folder / "manifest.json", 30)
    assert only("damaged", folder).location == "manifest"


def test_an_empty_slice(tmp_path):
    folder = ours(tmp_path / "d")
    for name in ("manifest.json", "slices.parquet"):
        (folder / name).unlink()
    write_token_slice(folder / "s2.safetensors", np.empty(0, np.uint16), np.empty(0, np.uint64))
    import_slices(folder)
    assert only("empty", folder).location == "s2.safetensors"


def test_safetensors_alone(tmp_path):
    path = ours(tmp_path / "d") / "s0.safetensors"
    alone = Path(shutil.copy(path, tmp_path / "alone.safetensors"))
    assert not findings(alone)
    data = bytearray(alone.read_bytes())
    index = data.index(np.arange(500, 5001, 500).astype("<u8").tobytes())
    data[index : index + 8] = (700).to_bytes(8, "little")  # Then 1000: still rising.
    assert not findings(alone)
    data[index : index + 8] = (70_000).to_bytes(8, "little")
    alone.write_bytes(data)
    assert only("document-ends", alone).location == "alone.safetensors"
    assert only("damaged", cut(alone, 7)).location == "header"


def test_rows(tmp_path):
    ids = text_tokens(64 * 128).reshape(64, 128)
    path = tmp_path / "rows.safetensors"
    write_rows_slice(path, {"input_ids": ids, "labels": ids.astype(np.int64)})
    assert not findings(path, vocab_size=50_257)
    ids[9] = ids[2]
    write_rows_slice(path, {"input_ids": ids})
    write_rows_slice(tmp_path / "other.safetensors", {"input_ids": ids[:1]})
    only("vocabulary-overflow", path, vocab_size=1000)
    write_rows_slice(path, {"input_ids": ids[:0]})
    only("empty", path)


# Impostors, and the command.


def test_files_that_are_not_the_data(tmp_path):
    (tmp_path / "c.npy").write_bytes(b"")
    model = tmp_path / "model.bin"
    with zipfile.ZipFile(model, "w") as archive:
        archive.writestr("data.pkl", "x" * 2000)
    assert faults(model) == {"not-the-data"} and not [item for item in findings(tmp_path) if item.path == str(model)]
    assert not findings(FOREIGN / "templar" / "sample_ids_000000.npy")
    assert faults(tmp_path / "c.npy") == {"empty"}
    (tmp_path / "d.parquet").write_bytes(b"")
    assert findings(tmp_path / "d.parquet")
    assert faults(tmp_path / "e.bin") == {"missing"}


def test_the_command(tmp_path, capsys):
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        np.save(file, text_tokens(5000))
    assert main(["doctor", str(path), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"] and result["reports"][0]["findings"][0]["fault"] == "header-as-tokens"
    assert main(["doctor", str(path)]) == 1
    message = capsys.readouterr().out
    command = next(line for line in message.splitlines() if "forebay convert" in line).partition("forebay ")[2]
    out = tmp_path / "out.bin"
    assert main(command.partition(",")[0].replace("FILE", str(path)).replace("OUT", str(out)).split()) == 0
    assert main(["doctor", str(out)]) == 0 and "ok: nothing wrong found" in capsys.readouterr().out
    assert main(["doctor", str(out), "--dtype", "uint8"]) == 2
    assert main(["doctor", str(FOREIGN / "mds_raw"), str(FOREIGN / "arrow"), "--vocab-size", "50257"]) in (0, 1)
    assert main(["doctor", str(tmp_path / "none")]) == 1
    assert main(["doctor", "s3://b/x.jsonl"]) == 2 and "got s3://b/x.jsonl" in capsys.readouterr().err
