"""Each fault of token files, made in a file and found."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cli import main
from forebay.formats import open_external
from forebay.formats.vectors import sample_id
from support.doctor_cases import EOS, faults, findings, only, reports, text_tokens
from support.token_shards import write_shard

N = 20_000


def raw(path: Path, tokens: np.ndarray) -> Path:
    path.write_bytes(tokens.tobytes())
    return path


def saved(path: Path, tokens: np.ndarray) -> Path:
    with path.open("wb") as file:
        np.save(file, tokens)
    return path


def sample_ids(tokens: np.ndarray) -> np.ndarray:
    return np.array([sample_id(row) for row in tokens.reshape(-1, 256)], "<u8")


def test_headers_inside_headerless_files(tmp_path):
    parts = [text_tokens(5001, seed) for seed in range(2)]
    for number, part in enumerate(parts):
        saved(tmp_path / f"{number}.part", part)
    path = tmp_path / "all.bin"
    path.write_bytes(parts[0].tobytes() + (tmp_path / "1.part").read_bytes())
    assert only("header-as-tokens", path, dtype=np.dtype("<u2")).location == "token 5001"


def test_a_npy_without_a_header(tmp_path):
    tokens = text_tokens(N)
    path = raw(tmp_path / "train_000000.npy", tokens)
    assert "numpy.save" in only("no-header", path).advice


@pytest.mark.parametrize("lost", [1, 1001])
def test_truncated_files(tmp_path, lost):
    tokens = text_tokens(N)
    path = saved(tmp_path / "a.npy", tokens)
    os.truncate(path, path.stat().st_size - lost)
    assert f"got {path.stat().st_size}" in only("truncated", path).evidence
    assert reports(path)[0].metadata["tokens"] == N - (lost + 1) // 2


def test_bytes_after_a_npy(tmp_path):
    path = saved(tmp_path / "a.npy", text_tokens(N))
    path.write_bytes(path.read_bytes() + b"\x05" * 999)
    result = only("appended", path)
    assert result.location == f"byte {128 + 2 * N}" and "truncate" in result.advice


@pytest.mark.parametrize("kind", [">u2", ">u4"])
def test_the_other_byte_order(tmp_path, kind):
    tokens = text_tokens(N, vocab=50257 if kind == ">u2" else 128_000, dtype=kind)
    little = kind.replace(">", "<")
    assert f"'{little}'" in only("byte-order", saved(tmp_path / "a.npy", tokens)).advice
    assert not findings(saved(tmp_path / "little-a.npy", tokens.astype(little)))


@pytest.mark.parametrize(
    "kind, assumed",
    [("<u4", "<u2"), ("<i8", "<u2"), ("<i8", "<u4"), ("<u2", "<u4")],
)
def test_one_type_read_as_another(tmp_path, kind, assumed):
    tokens = text_tokens(N, dtype=kind)
    path = raw(tmp_path / "a.bin", tokens)
    result = only("wrong-dtype", path, dtype=np.dtype(assumed))
    assert f"The tokens are {np.dtype(kind)}" in result.evidence
    out = tmp_path / "out.bin"
    assert main(["convert", str(path), str(out), "--to", "bin", "--set", f"input_dtype={np.dtype(kind).name}"]) == 0
    assert out.read_bytes() == tokens.astype("<u2" if kind == "<u2" else "<u4").tobytes() and not faults(out)


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_npy_of_a_type_that_loaders_refuse(tmp_path, kind):
    result = only("wrong-dtype", saved(tmp_path / "a.npy", text_tokens(N).astype(kind)))
    assert np.dtype(kind).name in result.evidence and "uint16" in result.advice
    assert not findings(saved(tmp_path / "b.npy", text_tokens(N).astype(kind).astype(np.uint16)))


def test_vocabulary_overflow_says_where(tmp_path):
    tokens = text_tokens(N)
    tokens[777] = 60_000
    result = only("vocabulary-overflow", raw(tmp_path / "a.bin", tokens), vocab_size=50257)
    assert result.location == "token 777" and "60000" in result.evidence


def test_zeros_that_were_set_aside(tmp_path):
    tokens = text_tokens(N)
    path = raw(tmp_path / "a.bin", tokens)
    os.truncate(path, 200_000)
    result = only("trailing-zeros", path)
    assert result.location == "byte 195904" and "set aside" in result.evidence


# Sample ids.


def pair(folder: Path, tokens: np.ndarray, ids: np.ndarray) -> Path:
    folder.mkdir(exist_ok=True)
    path, id_path = write_shard(folder, 0, tokens, 256)
    id_path.write_bytes(ids.astype("<u8").tobytes())
    return path


def test_sample_ids(tmp_path):
    """Sound ones; of the tokens in another type; all equal; one too many or too few; none."""
    tokens = text_tokens(40 * 256)
    sound = sample_ids(tokens)
    (report,) = reports(pair(tmp_path / "s", tokens, sound))
    assert report.ok and report.metadata["sample_tokens"] == 256 and report.metadata["sample_ids"] == 40
    invalid = sample_ids(tokens.astype(np.uint32)), np.full(40, 7), np.append(sound, 5), sound[:-3], sound[:0]
    for number, ids in enumerate(invalid):
        path = pair(tmp_path / str(number), tokens, ids)
        assert "move the ids away" in only("ids-mismatch", path).advice
    path.with_name("sample_ids_000000.bin").unlink()
    dataset = open_external(path)
    assert dataset.verify().ok and np.array_equal(dataset.open_slice(0).tokens, tokens)
    tokens[256 * 5] ^= 1  # Tokens that changed are not given new ids.
    assert "fetch" in only("ids-mismatch", pair(tmp_path / "changed", tokens, sound)).advice


def test_a_large_file_is_read_in_part(tmp_path):
    path = raw(tmp_path / "a.bin", text_tokens(3 << 20))
    (part,) = reports(path, max_bytes=1 << 20)
    (full,) = reports(path, max_bytes=1 << 20, full=True)
    assert part.kind == "raw tokens" and part.metadata["dtype"] == "uint16 (guessed)"
    assert part.ok and part.read_bytes < part.total_bytes and full.read_bytes == full.total_bytes


@settings(suppress_health_check=list(HealthCheck))
@given(st.integers(300, 200_000), st.integers(1, 6000), st.integers(0, 1 << 30), st.booleans(), st.booleans())
def test_clean_random_files_give_no_finding(tmp_path, vocab, count, seed, has_header, is_even):
    kind = np.uint16 if vocab <= 1 << 16 else np.uint32
    even = np.random.default_rng(seed).integers(0, vocab, count, kind)
    tokens = even if is_even else text_tokens(count, seed, vocab, kind)
    path = saved(tmp_path / "a.npy", tokens) if has_header else raw(tmp_path / "a.bin", tokens)
    registered = {"dtype": np.dtype(kind), "vocab_size": max(vocab, EOS + 1)}
    assert not findings(path, **registered)
    if has_header or count >= 1024:
        assert not findings(path)
