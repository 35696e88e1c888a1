"""A resumed conversion to a bucket: after any file, from any position, its slices are the same."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DatasetError, UsageError
from forebay.formats.bucket_sink import Cursor, compare_plans, conversion_plan, parts_behind
from forebay.formats.conversion import ConvertOptions, TokenPart, TokenSource
from forebay.formats.sources import open_source
from forebay.formats.token_stream import build_stream, slices_of

DOCUMENTS = st.lists(st.integers(0, 40), max_size=30)


def made_source(parts: list[list[int]], has_positions: list[bool]) -> TokenSource:
    """Return a source of whole documents; some parts have no position."""
    ids = iter(range(1 << 16))

    def part(lengths):
        tokens = np.array([next(ids) for _ in range(sum(lengths))], np.uint16)
        return TokenPart(tokens, np.cumsum(lengths, dtype=np.uint64))

    built = [part(lengths) for lengths in parts]

    def read(position):
        for index in range(position[0] if position else 0, len(built)):
            yield ([index] if has_positions[index % len(has_positions)] else None), built[index]

    num_tokens, num_documents = sum(map(sum, parts)), sum(map(len, parts))
    return TokenSource("test", "U16", num_tokens, num_documents, lambda: (p for _, p in read(None)), parts_from=read)


def slices(source: TokenSource, num_written: tuple[int, int]) -> list[tuple[list[int], list[int]]]:
    stream = build_stream(source, ConvertOptions(), "keep")
    stream.num_written = num_written
    return [(part.tokens.tolist(), part.document_ends.tolist()) for part in slices_of(stream, 256 + 120)]


@given(st.lists(DOCUMENTS, min_size=1, max_size=8), st.lists(st.booleans(), min_size=1, max_size=4))
def test_behind_every_slice_the_same_follow(parts, has_positions):
    source = made_source(parts, [True, *has_positions])
    assert source.parts_from is not None
    cursor = Cursor(source.parts_from, lambda part: len(part.tokens), 0, None)
    stream = build_stream(
        TokenSource("test", "U16", None, source.num_documents, lambda: iter(cursor)), ConvertOptions(), "keep"
    )
    expected, marks, count, ended = [], [], 0, 0
    for part in slices_of(stream, 256 + 120):
        expected.append((part.tokens.tolist(), part.document_ends.tolist()))
        count, ended = count + len(part.tokens), ended + len(part.document_ends)
        marks.append((count, ended, cursor.mark(count)))
    assert expected == slices(source, (0, 0))
    for number, (count, ended, mark) in enumerate(marks, 1):
        start, position = mark or (0, None)
        again = Cursor(source.parts_from, lambda part: len(part.tokens), start, position)
        rest = parts_behind(iter(again), count - start)
        behind = TokenSource("test", "U16", source.num_tokens, source.num_documents, lambda rest=rest: rest)
        assert slices(behind, (count, ended)) == expected[number:]


def plan(folder: Path, **changes: Any) -> dict:
    options = ConvertOptions(**changes)
    return conversion_plan(open_source(folder, options, "forebay"), "forebay", options)


def test_a_plan_of_other_inputs_or_settings_is_refused(tmp_path):
    for index in range(3):
        np.save(tmp_path / f"train_{index}.npy", np.arange(100, dtype=np.uint16))
    stored = plan(tmp_path)
    compare_plans("s3://b/p", stored, plan(tmp_path))
    with pytest.raises(UsageError, match=r"expected the settings with which .* got other eos_id, slice_bytes"):
        compare_plans("s3://b/p", stored, plan(tmp_path, eos_id=3, slice_bytes=1 << 20))
    np.save(tmp_path / "train_1.npy", np.arange(7, 107, dtype=np.uint16))
    os.utime(tmp_path / "train_1.npy", ns=(0, 0))
    with pytest.raises(DatasetError, match=r"train_1.npy: the input changed after the conversion"):
        compare_plans("s3://b/p", stored, plan(tmp_path))
    (tmp_path / "train_2.npy").unlink()
    with pytest.raises(DatasetError, match=r"the input changed after the conversion"):
        compare_plans("s3://b/p", stored, plan(tmp_path))
