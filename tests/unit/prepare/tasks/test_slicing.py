"""Slicing's laws: the stream is cut and nothing else; slices fill their bytes; a plan is a function of its parts."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.dataset.slices import TOKEN_HEADER_BYTES, open_slice
from forebay.errors import PrepareError, UsageError
from forebay.prepare.tasks import slicing
from forebay.prepare.tasks.shuffle import EncodedPart
from forebay.prepare.tasks.slicing import (
    SliceTask,
    plan_slices,
    slice_tasks,
    write_plan,
    write_slice,
)
from forebay.storage.store import open_store


def write_part(folder: Path, stem: str, lengths: list[int], first: int) -> EncodedPart:
    part = EncodedPart(stem, len(lengths), sum(lengths), "U16")
    ((np.arange(sum(lengths)) + first) % 60_000).astype("<u2").tofile(folder / part.object("tokens"))
    np.cumsum(lengths).astype("<u8").tofile(folder / part.object("ends"))
    return part


def write_parts(folder: Path, groups: list[list[int]]) -> list[EncodedPart]:
    starts = np.cumsum([0, *map(sum, groups)]).tolist()
    return [write_part(folder, f"p{i}", lengths, start) for i, (lengths, start) in enumerate(zip(groups, starts))]


def plan_tasks(folder: Path, parts: list[EncodedPart], **how: int) -> list[SliceTask]:
    store = open_store(folder)
    plans = plan_slices(parts, store, **how)
    return slice_tasks(plans, [write_plan(plan) for plan in plans], store, None, 1 << 24, 0)


def written(out: Path, parts: list[EncodedPart], **how: int) -> tuple[list[int], list[int], list[int]]:
    """All tokens and document ends of the slices, put together again; and the slices' sizes."""
    tokens, stops, sizes = [], [], []
    for task in plan_tasks(out, parts, **how):
        info = write_slice(task)
        result = open_slice(out / info.name)
        assert (info.count, info.documents) == (len(result.tokens), len(result.document_ends))
        assert hashlib.sha256((out / info.name).read_bytes()).hexdigest() == info.sha256
        stops += (result.document_ends.astype(int) + len(tokens)).tolist()
        tokens += result.tokens.tolist()
        sizes.append(info.bytes)
    return tokens, stops, sizes


@given(
    st.lists(st.lists(st.integers(1, 3000), max_size=12), min_size=1, max_size=5),
    st.integers(4096, 9000),
    st.sampled_from([6000, 1 << 33]),
)
def test_the_slices_are_the_stream(tmp_path_factory, groups, slice_bytes, planned_tokens):
    """Nothing but the last slice of each planned group differs from one plan of all."""
    folder = tmp_path_factory.mktemp("s")
    parts = write_parts(folder, groups)
    total = sum(map(sum, groups))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "_ENDS_AT_ONCE", 5)
        patch.setattr(slicing, "_GROUP_TOKENS", planned_tokens)
        tokens, stops, sizes = written(folder, parts, slice_bytes=slice_bytes)
    assert tokens == [i % 60_000 for i in range(total)]
    assert stops == np.cumsum([n for group in groups for n in group]).tolist()
    assert all(size <= slice_bytes for size in sizes)
    # As full as can be: another token and its end would not have fitted.
    assert sum(size <= slice_bytes - TOKEN_HEADER_BYTES - 10 for size in sizes) <= 1 + total // planned_tokens


def test_slices_of_so_many_tokens(tmp_path):
    groups = [[5, 10, 1], [100], [3] * 20]
    tokens, stops, sizes = written(tmp_path, write_parts(tmp_path, groups), count=32)
    assert tokens == list(range(176)) and len(sizes) == 6
    assert stops == np.cumsum([n for group in groups for n in group]).tolist()


def test_damage_and_misuse_are_noticed(tmp_path):
    parts, store = write_parts(tmp_path, [[10, 20], [30]]), open_store(tmp_path)
    with pytest.raises(UsageError):
        plan_slices(parts, store, slice_bytes=100)
    with pytest.raises(UsageError, match="one type"):
        plan_slices([parts[0], replace(parts[1], dtype="U32")], store)
    (task,) = plan_tasks(tmp_path, parts)
    for kind in ("tokens", "ends"):
        (tmp_path / parts[1].object(kind)).write_bytes(b"")
        with pytest.raises(PrepareError, match="fewer"):
            write_slice(task)
    with pytest.raises(PrepareError, match="expected 1 items"):
        plan_tasks(tmp_path, parts, slice_bytes=8192)
    assert plan_tasks(tmp_path, []) == []
