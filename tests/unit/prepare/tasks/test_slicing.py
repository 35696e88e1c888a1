"""Slicing's laws: the stream is cut and nothing else; slices fill their bytes; a plan is a function of its parts."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.dataset.slices import TOKEN_HEADER_BYTES, open_slice
from forebay.errors import PrepareError, UsageError
from forebay.prepare.tasks import slicing
from forebay.prepare.tasks.shuffle import EncodedPart
from forebay.prepare.tasks.slicing import plan_slices, write_slice
from forebay.storage.store import open_store


def part_of(folder: Path, stem: str, lengths: list[int], first: int) -> EncodedPart:
    part = EncodedPart(stem, len(lengths), sum(lengths), "U16")
    ((np.arange(sum(lengths)) + first) % 60_000).astype("<u2").tofile(folder / part.object("tokens"))
    np.cumsum(lengths).astype("<u8").tofile(folder / part.object("ends"))
    return part


def parts_of(folder: Path, groups: list[list[int]]) -> list[EncodedPart]:
    starts = np.cumsum([0, *map(sum, groups)]).tolist()
    return [part_of(folder, f"p{i}", lengths, start) for i, (lengths, start) in enumerate(zip(groups, starts))]


def whole(out: Path, parts: list[EncodedPart], **how: int) -> tuple[list[int], list[int], list[int]]:
    """All tokens and document ends of the slices, put together again; and the slices' sizes."""
    tokens, stops, sizes, store = [], [], [], open_store(out)
    for task in plan_slices(parts, store, **how).tasks(store, store):
        info = write_slice(task)
        result = open_slice(out / info.name)
        assert (info.count, info.documents) == (len(result.tokens), len(result.document_ends))
        assert hashlib.sha256((out / info.name).read_bytes()).hexdigest() == info.sha256
        stops += (result.document_ends.astype(int) + len(tokens)).tolist()
        tokens += result.tokens.tolist()
        sizes.append(info.bytes)
    return tokens, stops, sizes


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3000), max_size=12), min_size=1, max_size=5), st.integers(4096, 9000))
def test_the_slices_are_the_stream(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], slice_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("s")
    parts = parts_of(folder, groups)
    total = sum(map(sum, groups))
    tokens, stops, sizes = whole(folder, parts, slice_bytes=slice_bytes)
    assert tokens == [i % 60_000 for i in range(total)]
    assert stops == np.cumsum([n for group in groups for n in group]).tolist()
    assert all(size <= slice_bytes for size in sizes)
    # As full as can be: another token and its end would not have fitted.
    assert all(size > slice_bytes - TOKEN_HEADER_BYTES - 10 for size in sizes[:-1])


def test_the_cut_is_the_one_of_format_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    groups = [rng.integers(1, 40, 3000).tolist(), [1] * 5000, [], rng.integers(1, 9000, 20).tolist()]
    parts = parts_of(tmp_path, groups)
    offsets = np.cumsum([n for group in groups for n in group]).astype(np.uint64)
    monkeypatch.setattr(slicing, "_ENDS_AT_ONCE", 100)
    store = open_store(tmp_path)
    plan = plan_slices(parts, store, slice_bytes=5000)
    start = first = 0
    for task in plan.tasks(store, store):
        edges = np.fromfile(tmp_path / f"{task.plan}.cuts", "<i8", count=2, offset=16 * task.index)
        assert edges.tolist() == [start, first]
        stops = np.arange(start + 1, min(int(offsets[-1]), start + 2500) + 1)
        inside = np.searchsorted(offsets, stops.astype(np.uint64), "right") - first
        fits = (stops - start) * 2 + 8 * inside + TOKEN_HEADER_BYTES <= 5000
        start, first = int(stops[fits][-1]), first + int(inside[fits][-1])
    assert (start, first) == (int(offsets[-1]), len(offsets)) and plan.slices > 30


def test_slices_of_so_many_tokens(tmp_path: Path) -> None:
    groups = [[5, 10, 1], [100], [3] * 20]
    tokens, stops, sizes = whole(tmp_path, parts_of(tmp_path, groups), slice_tokens=32)
    assert tokens == list(range(176)) and len(sizes) == 6
    assert stops == np.cumsum([n for group in groups for n in group]).tolist()


def test_damage_and_misuse_are_noticed(tmp_path: Path) -> None:
    parts, store = parts_of(tmp_path, [[10, 20], [30]]), open_store(tmp_path)
    with pytest.raises(UsageError):
        plan_slices(parts, store, slice_bytes=100)
    with pytest.raises(UsageError, match="one type"):
        plan_slices([parts[0], replace(parts[1], dtype="U32")], store)
    (task,) = plan_slices(parts, store).tasks(store, store)
    for kind in ("tokens", "ends"):
        (tmp_path / parts[1].object(kind)).write_bytes(b"")
        with pytest.raises(PrepareError, match="fewer"):
            write_slice(task)
    with pytest.raises(PrepareError, match="expected 1 documents"):
        plan_slices(parts, store, slice_bytes=8192)
    assert plan_slices([], store).slices == 0
