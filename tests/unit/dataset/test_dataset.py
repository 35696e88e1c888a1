"""The dataset's laws: its bytes are its identity, any reader opens it, and no damage passes unseen."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from forebay.cli import main
from forebay.dataset.chunks import HASH_BYTES, MIN_CHUNK_BYTES
from forebay.dataset.import_slices import import_slices
from forebay.dataset.lengths import encode_lengths
from forebay.dataset.manifest import LENGTHS_FILE, Manifest, SliceInfo, SliceTable, dataset_id
from forebay.dataset.reader import open_dataset, verify_dataset
from forebay.dataset.slices import hash_file, open_slice, write_rows_slice, write_token_slice
from forebay.errors import DatasetError, UsageError
from forebay.files import atomic_write
from support.paths import GOLDEN


def make_manifest(table: SliceTable, **changes: Any) -> Manifest:
    lineage = {"recipe": {"seed": 0}, "inputs": [{"name": "ä.txt", "bytes": 3}]}
    traits = {
        "name": "tiny",
        "layout": "tokens",
        "dtype": "U16",
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eos_id": 256,
    }
    manifest = Manifest.of(table, lineage, **traits)
    return replace(manifest, **{"lengths_bytes": 7, "lengths_sha256": "ef" * 32, **changes})


def make_dataset(folder: Path) -> Path:
    """Slices of one chunk, but the last has three."""
    (folder / "slices").mkdir(parents=True)
    for i in range(3):
        tokens = np.arange(i * 100, i * 100 + (90 if i < 2 else 4500) + i, dtype=np.uint16)
        write_token_slice(folder / f"slices/{i:06d}.safetensors", tokens, np.array([10, 50 + i], np.uint64))
    manifest = import_slices(folder, "tiny").manifest
    (folder / "tokenizer.json").write_text("{}")
    lineage = {"files": {"tokenizer.json": hash_file(folder / "tokenizer.json")}}
    atomic_write(folder / "manifest.json", replace(manifest, lineage=lineage).to_json())
    return folder


def golden_table() -> SliceTable:
    return SliceTable.from_rows(
        [
            SliceInfo(0, "slices/000000.safetensors", 1000, "ab" * 32, 400, 7),
            SliceInfo(1, "slices/000001.safetensors", 500, "01" * 32, 150, 2),
        ],
        MIN_CHUNK_BYTES,
    )


def test_golden_bytes(tmp_path):
    """These change only with a format version; the table's bytes name its writer, so that it is only read."""
    path, stops = tmp_path / "s.safetensors", np.array([3, 5], np.uint64)
    written = write_token_slice(path, np.arange(6000, dtype=np.uint16), stops, MIN_CHUNK_BYTES)
    expected = json.loads((GOLDEN / "slice.json").read_text())
    assert {"bytes": written.size, "sha256": written.sha256, "leaves": written.leaves.hex()} == expected
    assert len(written.leaves) == 3 * HASH_BYTES
    frame = "28b52ffd2008410000"  # its magic number, the size, and the head of a block as it is
    assert encode_lengths(stops, 6000).hex() == frame + "0302" + 3 * "0000"
    manifest = make_manifest(golden_table(), table_sha256="cd" * 32)
    assert manifest.to_json() == (GOLDEN / "manifest.json").read_bytes()
    assert dataset_id(manifest.to_json()) == (GOLDEN / "dataset_id.txt").read_text().strip()
    read = SliceTable.from_parquet((GOLDEN / "slices.parquet").read_bytes(), MIN_CHUNK_BYTES)
    assert [read.row(i) for i in range(len(read))] == [golden_table().row(i) for i in range(2)]


@pytest.mark.parametrize("version", ["1", "2", "4", "3.0", "true", '"3"'])
def test_other_formats_are_refused(version, tmp_path, capsys):
    data = (GOLDEN / "manifest.json").read_text().replace('"format": 3', f'"format": {version}')
    (tmp_path / "manifest.json").write_text(data)
    with pytest.raises(DatasetError, match=r"expected format 3, got format .*\. Prepare the dataset again") as error:
        open_dataset(tmp_path)
    assert main(["verify", str(tmp_path), "-q"]) == 1
    output = capsys.readouterr()
    assert output.out == "changed: manifest.json\n" and output.err.strip() in str(error.value)


_DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "?"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rows=st.integers(0, 5))
def test_rows_round_trip(tmp_path, data, rows):
    names = data.draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
    names = [n.encode("utf-8", "ignore").decode() + str(i) for i, n in enumerate(names)]
    tensors = {}
    for name in names:
        shape = (rows, *data.draw(st.lists(st.integers(0, 3), max_size=2)))
        dtype = np.dtype("<" + data.draw(st.sampled_from(_DTYPES)))
        tensors[name] = data.draw(hnp.arrays(dtype, shape))
    path = tmp_path / "r.safetensors"
    write_rows_slice(path, tensors)
    ours, theirs = open_slice(path), load_file(path)
    assert ours.num_rows == rows and set(ours.tensors) == set(theirs) == set(tensors)
    for name, array in tensors.items():
        for other in (ours.tensors[name], theirs[name]):
            assert other.dtype == array.dtype and other.shape == array.shape
            assert other.tobytes() == array.tobytes()


def raw_slice(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + body)
    return path


def _entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


_HOSTILE = {
    "length past end": ({"a": _entry()}, b"1234", 4000),
    "overlap": ({"a": _entry(), "b": _entry(offsets=[2, 6])}, b"123456", None),
    "hole": ({"a": _entry(), "b": _entry(offsets=[6, 10])}, b"1234567890", None),
    "past end": ({"a": _entry(shape=[400], offsets=[0, 400])}, b"1234", None),
    "bytes left over": ({"a": _entry()}, b"12345", None),
    "unknown dtype": ({"a": _entry("U128")}, b"1234", None),
    "dtype no string": ({"a": _entry(["U8"])}, b"1234", None),
    "shape against offsets": ({"a": _entry("U16")}, b"1234", None),
    "negative": ({"a": _entry(shape=[-4], offsets=[4, 0])}, b"1234", None),
    "shape wraps 64 bits": ({"a": _entry(shape=[1 << 62, 4], offsets=[0, 0])}, b"", None),
    "float": ({"a": _entry(shape=[4.0])}, b"1234", None),
    "bool": ({"a": _entry(shape=[True], offsets=[0, 1])}, b"1", None),
    "no object": ([1, 2], b"", None),
    "not JSON": (b"{nonsense", b"", None),
    "deep": (b'{"a":' * 100_000, b"", None),
    "key twice": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
        None,
    ),
    "metadata": ({"__metadata__": {"a": 1}}, b"", None),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_header(tmp_path, name):
    header, body, length = _HOSTILE[name]
    with pytest.raises(DatasetError, match="expected"):
        open_slice(raw_slice(tmp_path / "h.safetensors", header, body, length))


@given(data=st.binary(max_size=300), offset=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_garbage_manifest_and_table(data, offset, bit):
    table = golden_table().to_parquet()
    full = make_manifest(golden_table()).to_json()
    for parse, good in ((Manifest.from_json, full), (SliceTable.from_parquet, table)):
        flipped = bytearray(good)
        flipped[offset % len(good)] ^= 1 << bit
        for invalid in (data, bytes(flipped), good[: offset % len(good)]):
            try:
                parse(invalid)
            except DatasetError:
                continue
            assert good is table  # every flip of a manifest is seen; the table has its hash


def test_wrong_use_is_refused(tmp_path):
    good = np.zeros(4, np.uint16)
    for tokens, stops in [
        (good.astype(np.int64), np.array([4], np.uint64)),
        (good.reshape(2, 2), np.array([4], np.uint64)),
        (good, np.array([5], np.uint64)),
        (good, np.array([3, 2], np.uint64)),
        (good, np.array([4], np.int64)),
    ]:
        with pytest.raises(UsageError):
            write_token_slice(tmp_path / "w.safetensors", tokens, stops)
    for tensors in (
        {},
        {"a": np.zeros(2), "b": np.zeros(3)},
        {"a": np.zeros(())},
        {"a": np.zeros(2, complex)},
    ):
        with pytest.raises(UsageError):
            write_rows_slice(tmp_path / "w.safetensors", tensors)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "a\\..\\x.safetensors", "", "x.txt"]
)
def test_path_escape(name):
    with pytest.raises(DatasetError, match="inside"):
        SliceTable.from_rows([SliceInfo(0, name, 1, "00" * 32, 1, 1)])
    ones = np.ones(1, np.int64)
    hidden = SliceTable(pa.array([name]), ones, np.zeros((1, 32), np.uint8), ones, ones)
    with pytest.raises(DatasetError, match="inside"):
        SliceTable.from_parquet(hidden.to_parquet())


def test_manifest_checks():
    table = golden_table()
    for changes in (
        {"chunk_bytes": 0}, {"lengths_bytes": -1}, {"lengths_bytes": 300}, {"lengths_sha256": "EF" * 32},
        {"chunk_bytes": 3 << 12}, {"chunk_bytes": 1 << 17}, {"chunk_bytes": 1 << 11},
        {"chunk_bytes": True}, {"layout": "columns"}, {"dtype": "U8"}, {"tokens": -1}, {"tokens": True},
        {"tokens": 1.5}, {"eos_id": 257}, {"name": "a/b"}, {"name": ""}, {"table_sha256": "xy"}, {"lineage": []},
        {"rows": 1}, {"layout": "rows"}, {"vocab_size": 1 << 20},
    ):  # fmt: skip
        with pytest.raises(DatasetError, match="expected"):
            make_manifest(table, **changes)
    files = dict.fromkeys(("tokenizer.json", "a/b", "..", ".", ""), "ab")
    expected = {"tokenizer.json": "ab", LENGTHS_FILE: "ef" * 32}
    assert make_manifest(table, lineage={"files": files}).listed_files == expected
    rows = {"layout": "rows", "dtype": "", "rows": 550, "tokens": 0}
    for wrong in ({"lengths_sha256": ""}, rows):
        with pytest.raises(DatasetError, match="lengths_sha256 of layout tokens alone"):
            Manifest.from_json(make_manifest(table, **wrong).to_json())


def test_open_and_read(tmp_path):
    dataset = open_dataset(make_dataset(tmp_path / "d"))
    assert (dataset.num_slices, dataset.num_tokens, dataset.name) == (3, 4683, "tiny")
    plain = json.loads((tmp_path / "d/manifest.json").read_bytes())
    del plain["check"], plain["name"]
    canonical = json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    assert dataset.id == hashlib.sha256(canonical.encode()).hexdigest()
    tokens = dataset.open_slice(2).tokens
    assert tokens[0] == 200 and dataset.open_slice(2) is dataset.open_slice(2)
    assert tokens.flags.aligned and not tokens.flags.writeable and not tokens.flags.owndata
    assert open_dataset(f"file://{tmp_path}/d").describe() == dataset.describe()
    hashed = []
    assert dataset.verify(on_progress=hashed.append).ok and sum(hashed) == dataset.manifest.bytes
    with pytest.raises(UsageError):
        dataset.open_slice(3)
    with pytest.raises(UsageError):
        open_dataset("s3://bucket/x")
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(DatasetError, match=r"manifest\.json"):
            open_dataset(missing)


def test_verify_names_any_flipped_byte(tmp_path):
    folder = make_dataset(tmp_path / "d")
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        for index in range(0, len(data), max(1, len(data) // 7)):
            path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
            report = verify_dataset(folder)
            assert not report.ok and report.bad == [path.relative_to(folder).as_posix()]
        path.write_bytes(data)
    assert verify_dataset(folder).ok


def test_verify_names_missing_and_extra(tmp_path):
    folder = make_dataset(tmp_path / "d")
    (folder / "slices/000001.safetensors").unlink()
    (folder / "slices/999999.safetensors").write_bytes(b"x")
    (folder / "README").write_text("mine")
    report = open_dataset(folder).verify()
    assert report.missing == ["slices/000001.safetensors"]
    assert report.extra == ["README", "slices/999999.safetensors"]
    assert report.bad == ["slices/000001.safetensors", "slices/999999.safetensors"] and not report.ok
    with pytest.raises(DatasetError, match="000001"):
        open_dataset(folder).open_slice(1)


def test_files_of_another_dataset(tmp_path):
    folder = make_dataset(tmp_path / "d")
    write_token_slice(folder / "slices/000000.safetensors", np.zeros(98, np.uint16), np.array([1], np.uint64))
    with pytest.raises(DatasetError, match="expected 90 tokens U16 in 2 documents, got 98 U16 in 1"):
        open_dataset(folder).open_slice(0)
    (folder / "slices.parquet").write_bytes(golden_table().to_parquet())
    with pytest.raises(DatasetError, match="sha256"):
        open_dataset(folder)
    (folder / "manifest.json").write_bytes(make_manifest(golden_table(), tokens=3).to_json())
    with pytest.raises(DatasetError, match="totals"):
        open_dataset(folder)


def test_import_rows(tmp_path):
    rows = tmp_path / "rows"
    (rows / "b").mkdir(parents=True)
    for name, n in (("b/x.safetensors", 3), ("a.safetensors", 2)):
        save_file({"ids": np.full((n, 4), n, np.int64), "pixels": np.zeros((n, 2, 2), np.float32)}, rows / name)
    dataset = import_slices(rows, "theirs")
    assert dataset.manifest.layout == "rows" and dataset.manifest.rows == 5 and dataset.verify().ok
    assert [dataset.table.row(i).name for i in range(2)] == ["a.safetensors", "b/x.safetensors"]
    assert dataset.open_slice(1).tensors["ids"][0, 0] == 3
    assert import_slices(rows, "theirs").id == dataset.id
    with pytest.raises(UsageError, match="other dataset"):
        import_slices(rows, "again")


def test_import_refuses(tmp_path):
    with pytest.raises(DatasetError, match="directory"):
        import_slices(tmp_path / "none", "x")
    with pytest.raises(DatasetError, match="got none"):
        import_slices(tmp_path, "x")
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "1.safetensors")
    save_file({"a": np.zeros((2, 4), np.float32)}, tmp_path / "2.safetensors")
    with pytest.raises(DatasetError, match=r"2\.safetensors"):
        import_slices(tmp_path, "x")
    assert not (tmp_path / "manifest.json").exists()
