"""Tokens: laws of slices and documents, what is refused, and that nothing is left of what failed.

That tokens come back from every format is in contract/test_formats.py.
"""

import json
import os
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli import main
from forebay.convert import convert
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import write_rows_slice
from forebay.errors import DatasetError, UsageError
from forebay.formats import open_external
from forebay.formats.base import get_format
from forebay.formats.conversion import ConvertOptions, TokenPart, TokenSource
from forebay.formats.shard_writer import write_shards
from forebay.formats.sources import open_source
from forebay.formats.token_stream import TokenDigest, build_stream, slices_of
from support.foreign_datasets import DOCUMENTS, FOREIGN, STREAM, read_tokens
from support.token_slices import check_lengths

SMALL = ConvertOptions(slice_bytes=4096)


def token_source(tokens: list[int], stops: list[int], cuts: list[int], dtype: str = "U16") -> TokenSource:
    """Tokens and ends cut at places; an end at a cut goes to the part before it."""
    array = np.array(tokens, np.uint16 if dtype == "U16" else np.uint32)
    parts, last = [], 0
    edges = [0, *sorted(cuts), len(tokens)]
    for a, b in pairwise(edges):
        stop = sum(end <= b for end in stops)
        parts.append(TokenPart(array[a:b], np.array([end - a for end in stops[last:stop]], np.uint64)))
        last = stop
    return TokenSource("memory", dtype, len(tokens), len(stops), lambda: iter(parts))


@st.composite
def streams(draw: st.DrawFn) -> TokenSource:
    tokens = draw(st.lists(st.integers(0, 60_000), min_size=1, max_size=80))
    n = len(tokens)
    stops = sorted(draw(st.lists(st.integers(0, n), max_size=12)))
    return token_source(tokens, stops, draw(st.lists(st.integers(0, n), max_size=5)))


@given(streams(), st.integers(1, 40))
def test_slices_are_the_stream_however_it_was_cut(source, size):
    full, cut = TokenDigest(), TokenDigest()
    for part in source.parts():
        full.add(part)
    stream = build_stream(source, ConvertOptions(), "keep")
    slices = list(slices_of(stream, 256 + 8 * size))
    for part in slices:
        cut.add(part)
        assert not len(part.document_ends) or int(part.document_ends[-1]) <= len(part.tokens)
        assert len(part.tokens) == 1 or 2 * len(part.tokens) + 8 * len(part.document_ends) <= 8 * size
    assert cut.text == full.text == stream.digest.text


def test_a_converted_dataset_is_whole_and_has_its_source_in_its_lineage(tmp_path):
    convert(FOREIGN / "megatron_u16", tmp_path / "wide", "forebay", replace(SMALL, dtype="U32", eos_id=9, name="n"))
    dataset = open_dataset(tmp_path / "wide")
    assert dataset.verify().ok
    m = dataset.manifest
    assert (m.name, m.dtype, m.eos_id, m.tokens, m.documents) == ("n", "U32", 9, len(STREAM), len(DOCUMENTS))
    assert m.lineage["converted"] == {}
    convert(tmp_path / "wide", tmp_path / "narrow", "forebay", replace(SMALL, dtype="U16", slice_bytes=600))
    again = open_dataset(tmp_path / "narrow")
    assert (again.manifest.dtype, again.num_slices, again.manifest.eos_id) == ("U16", 5, 9)
    assert again.manifest.lineage["converted"]["id"] == dataset.id
    assert read_tokens(tmp_path / "narrow") == DOCUMENTS
    check_lengths(again)


def test_plain_safetensors_are_read(tmp_path):
    convert(FOREIGN / "megatron_u16", tmp_path / "ds", "forebay", SMALL)
    with pytest.raises(DatasetError, match=r"forebay import DIR"):
        open_source(tmp_path / "ds" / "slices", ConvertOptions(), "bin")
    import_slices(tmp_path / "ds" / "slices")
    assert read_tokens(tmp_path / "ds" / "slices") == DOCUMENTS
    write_rows_slice(tmp_path / "rows.safetensors", {"input_ids": STREAM[:608].reshape(-1, 16).astype(np.uint16)})
    assert read_tokens(tmp_path / "rows.safetensors") == STREAM[:608].reshape(-1, 16).tolist()


@pytest.mark.parametrize("to", ["bin", "forebay", "parquet"])
def test_tokens_that_contradict_their_ids_are_not_converted_as_something_else(to, tmp_path):
    write_shards(open_external(FOREIGN / "templar"), tmp_path / "in", seq_len=512)
    file = tmp_path / "in" / "train_000000.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DatasetError, match="sample 7"):
        convert(tmp_path / "in", tmp_path / "out", to, SMALL)


def test_a_token_that_does_not_fit_is_named_with_its_place(tmp_path):
    source = token_source([1, 2, 3, 70_000, 5, 80_000], [2, 6], [3], "U32")
    with pytest.raises(UsageError, match=r"65535 .* 70000 at token 3, after 1 documents\. .*uint32"):
        convert(source, tmp_path / "out", "bin", ConvertOptions(dtype="U16"))
    high = token_source([1, 1 << 31], [2], [], "U32")
    with pytest.raises(UsageError, match="2147483648 at token 1"):
        convert(high, tmp_path / "out", "megatron", ConvertOptions())
    assert convert(high, tmp_path / "out", "forebay", ConvertOptions()).num_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_documents_end_must_be_known(tmp_path):
    source = token_source([5, 6, 9, 7, 9, 9, 8], [], [3])
    with pytest.raises(UsageError, match=r"--set eos_id=N.*--seq-len N"):
        convert(source, tmp_path / "out", "megatron", ConvertOptions())
    convert(source, tmp_path / "eos", "megatron", ConvertOptions(eos_id=9))
    assert read_tokens(tmp_path / "eos") == [[5, 6, 9], [7, 9], [9], [8]]
    convert(source, tmp_path / "three", "megatron", ConvertOptions(seq_len=3))
    assert read_tokens(tmp_path / "three") == [[5, 6, 9], [7, 9, 9], [8]]
    open_end = token_source([1, 2, 3, 4], [3], [])
    report = convert(open_end, tmp_path / "end", "megatron", ConvertOptions())
    assert read_tokens(tmp_path / "end") == [[1, 2, 3], [4]]
    assert report.written.notes == ("the last 1 tokens end no document of the source: they were given an end",)
    assert convert(open_end, tmp_path / "ours", "forebay", ConvertOptions()).written.num_documents == 1


def test_nothing_is_left_of_what_failed(tmp_path):
    def fail(_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        convert(FOREIGN / "arrow", tmp_path / "out", "megatron", ConvertOptions(on_progress=fail))
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_not_free_is_kept_unless_forced(tmp_path):
    out = tmp_path / "out"
    convert(FOREIGN / "arrow", out, "megatron", SMALL)
    with pytest.raises(UsageError, match="--overwrite"):
        convert(FOREIGN / "arrow", out, "bin", SMALL)
    with pytest.raises(UsageError, match="--set eos_id"):  # Fails late: what was there is still there.
        convert(FOREIGN / "templar", out, "megatron", SMALL, force=True)
    assert read_tokens(out) == DOCUMENTS
    convert(FOREIGN / "arrow", out, "bin", SMALL, force=True)
    assert [path.name for path in out.iterdir()] == ["train.bin"]
    for position in (out, tmp_path):
        with pytest.raises(UsageError, match="another path"):
            convert(out, position, "ds", ConvertOptions(input_dtype="uint32"), force=True)


def test_what_the_disk_gives_back_otherwise_is_not_kept(tmp_path, monkeypatch):
    good = get_format("megatron").write_tokens

    def failing_disk(source, out, options):
        written = good(source, out, options)
        data = bytearray((out / written.files[0]).read_bytes())
        data[100] ^= 1
        (out / written.files[0]).write_bytes(data)
        return written

    monkeypatch.setattr(get_format("megatron"), "write_tokens", failing_disk)
    with pytest.raises(DatasetError, match="or others, when reading them again"):
        convert(FOREIGN / "arrow", tmp_path / "out", "megatron", SMALL)
    assert not list(tmp_path.iterdir())


def test_memory_is_that_of_a_piece_and_counts_are_of_64_bits(tmp_path):
    with (tmp_path / "big.bin").open("wb") as file:
        os.truncate(file.fileno(), 32 << 20)
    tracemalloc.start()
    report = convert(
        tmp_path / "big.bin", tmp_path / "out", "forebay", ConvertOptions(input_dtype="u16", slice_bytes=1 << 20)
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.written.num_tokens == 16 << 20 and peak < 24 << 20
    with (tmp_path / "huge.bin").open("wb") as file:
        os.truncate(file.fileno(), 3 << 40)
    source = open_source(tmp_path / "huge.bin", ConvertOptions(input_dtype="u16"))
    assert isinstance(source, TokenSource) and source.num_tokens == 3 << 39
    with pytest.raises(UsageError, match="expected space for 1649267441664 tokens"):
        convert(source, tmp_path / "no", "bin", ConvertOptions(dtype="U32"))


def test_the_command(tmp_path, capsys):
    source, out = str(FOREIGN / "arrow"), str(tmp_path / "x")
    command = ["convert", source, str(tmp_path / "out"), "--to", "bin", "--dtype", "uint16", "--json", "--quiet"]
    assert main(command) == 0
    result = capsys.readouterr()
    reported = json.loads(result.out)
    assert reported["tokens"] == len(STREAM) and reported["source"] == "arrow"
    assert "note: the ends of 24 documents" in result.err
    (tmp_path / "what").write_bytes(b"\x00\x01\x02 nothing known")
    for arguments, code, message in (
        (command[1:], 2, "--overwrite"),
        ([source, out], 2, "--to (one of"),
        ([str(tmp_path / "what"), out, "--to", "bin"], 1, "what"),
        ([str(tmp_path / "none"), out, "--to", "bin"], 1, "none"),
        (["ftp://host/data", out, "--to", "bin"], 1, "cannot read input: expected a path or a URL of http, https"),
        ([source, "s3://bucket/data", "--to", "bin"], 2, "expected a format in several files"),
        ([source, "https://host/data", "--to", "safetensors"], 2, ""),
        ([source, "s3://bucket/data", "--to", "safetensors", "--overwrite"], 2, ""),
    ):
        assert main(["convert", *arguments]) == code, arguments
        assert message in capsys.readouterr().err


# Replacing an output: the old one or the new one is there, whatever fails.


@pytest.fixture
def folder(tmp_path) -> Path:
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("old")
    return tmp_path


def names_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("failing", [{1}, {2}, {2, 3}])
def test_each_rename_may_fail_and_the_old_output_stays(folder, failing, monkeypatch):
    real, calls = Path.rename, []

    def rename(self, target):
        calls.append(target)
        if len(calls) in failing:
            raise OSError(5, "injected", str(self))
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="injected"):
            convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions(), force=True)
    with pytest.raises(UsageError, match="path that is free"):  # The next run gives the old one its name again.
        convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions())
    assert names_below(folder) == ["out", "precious.txt", "t.npy"]
    convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions(), force=True)
    names = names_below(folder)
    assert "manifest.json" in names and "precious.txt" not in names
    assert sorted(path.name for path in folder.iterdir()) == ["out", "t.npy"]
