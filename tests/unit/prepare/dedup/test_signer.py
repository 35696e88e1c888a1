"""Signatures on disk: their bytes, their commit, and hashes of documents, lines and paragraphs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.prepare.dedup.deduplicate import Signer
from forebay.prepare.dedup.kernels import hash128
from forebay.prepare.dedup.methods import Dedup
from forebay.storage.store import open_store
from support.dedup_bench import Bench


def test_hash_has_the_published_vectors():
    def hexed(data):
        return "".join(f"{int(h):016x}" for h in hash128(np.frombuffer(data, np.uint8), len(data)))

    assert hexed(b"") == "0" * 32
    assert hexed(b"hello") == "cbd8a7b341bd9b025b1e906a48ae1d19"
    assert hexed(b"The quick brown fox jumps over the lazy dog") == "e34bbc7bbc071b6c7a433ca9c49a9347"


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=12), cut=st.integers(1, 12))
def test_the_same_bytes_however_batches_are_cut(fresh: Callable[[], Bench], texts, cut):
    config = Dedup(exact=True, minhash=True, lines=True, min_characters=2, keep="longest")
    assert fresh().sign(texts, config, cut).sha256 == fresh().sign(texts, config).sha256


def test_nothing_is_left_after_an_exception(tmp_path):
    def fail():
        with Signer(open_store(tmp_path), "p", Dedup(exact=True, minhash=True)) as signer:
            signer.add(pa.record_batch({"text": pa.array(["a"], pa.large_string())}))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_truncated_signatures_are_noticed(bench: Bench):
    part = bench.sign(["a", "b"], Dedup(minhash=True, bands=2))
    path = Path(f"{part.prefix}.minhash")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PrepareError, match="got fewer"):
        bench.deduplicate([part], Dedup(minhash=True, bands=2))


def test_signatures_are_those_of_version_2(bench: Bench):
    """Stored signatures are compared with later ones: these numbers change only with SIGNATURE_VERSION."""
    config = Dedup(exact=True, minhash=True, lines=True, bands=2, rows=2, normalise="space")
    text = "The quick brown fox jumps over the lazy dog; Größe, 東京 and a-very-long-wordthatdoesnotend.\n"
    part = bench.sign([text], config)
    result = {e: np.fromfile(f"{part.prefix}.{e}", "<u8").tolist() for e in ("exact", "minhash", "units")}
    assert result == {
        "exact": [3859748195517182933, 17436956826617955823],
        "minhash": [11723086721257631480, 16709145831601349859],
        "units": [3859748195517182933, 17436956826617955823],
    }
