"""Lanes: disjoint and together everything, and the same samples in worlds of any size."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DatasetError, StateError, UsageError
from forebay.formats.inputs import InputFile, ReadOptions
from forebay.prepare.inputs import divide_file, find_inputs, read_split, split_files
from forebay.stream import records as stream_records
from forebay.stream.records import Share, find_records, share_files
from support.streams import ROWS, as_tuples, parquet, samples, stream, take_state, write_files


def write(folder: Path, suffix: str) -> Path:
    return write_files(folder, suffix, {"parquet": 2, "jsonl": 3}[suffix])  # fewer files than lanes


@given(
    files=st.lists(st.tuples(st.integers(0, 9 << 20), st.booleans()), min_size=1, max_size=12),
    lanes=st.integers(1, 9),
)
def test_parts_of_files_are_disjoint_and_together_all(files, lanes):
    sources = [
        InputFile(str(i), str(i), "jsonl", "" if divides else "gz", size, "") for i, (size, divides) in enumerate(files)
    ]
    seen = Counter[tuple[str, tuple[int, ...], int]]()
    load = [0] * lanes
    for lane in range(lanes):
        for part in share_files(sources, Share(lane, lanes)):
            if part.share.lanes > 1:
                assert part.share == (lane, lanes) and not part.borders
            size = part.file.bytes
            seen[part.file.path, part.borders, part.index] += 1
            load[lane] += part.borders[part.index + 1] - part.borders[part.index] if part.borders else size
            assert not part.borders or (part.borders[0], part.borders[-1]) == (0, size)
    dealt = all(count == lanes for count in seen.values())
    assert dealt or set(seen.values()) == {1}
    assert {path for path, *_ in seen} == {source.path for source in sources}
    for path, borders, _ in seen:  # every part of a divided file
        assert {(path, borders, i) for i in range(max(1, len(borders) - 1))} <= set(seen)
    assert all(load) or dealt
    if not dealt and all(divides for _, divides in files):
        assert max(load) <= 1.06 * sum(load) / lanes + 1


@given(
    lines=st.lists(st.text("ab\r", max_size=30), max_size=20),
    newline=st.booleans(),
    cuts=st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True), max_size=6, unique=True),
    group=st.integers(1, 9),
)
def test_every_record_of_a_divided_file_is_in_one_part(tmp_path_factory, lines, newline, cuts, group):
    folder = tmp_path_factory.mktemp("divided")
    (folder / "a.txt").write_bytes("\n".join(lines).encode() + b"\n" * newline)
    (folder / "a.parquet").write_bytes(parquet([{"id": "", "text": line} for line in [*lines, "x"]], group))
    for name, options in (("a.txt", ReadOptions(format="lines")), ("a.parquet", ReadOptions())):
        file = find_inputs(folder / name, options).files[0]
        borders = sorted({0, *(int(cut * file.bytes) for cut in cuts), file.bytes})
        if file.bytes:
            parts = divide_file(file, options, borders)
            assert len(parts) == len(borders) - 1
            records = [record.text for part in parts if part for record in read_split(part, options)]
            assert records == [r.text for split in split_files([file], options) for r in read_split(split, options)]


def test_a_damaged_file_is_reported_by_one_lane(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_records, "MIN_SHARE_BYTES", 1)
    folder = write(tmp_path / "files", "parquet")
    (folder / "damaged.parquet").write_bytes((folder / "000.parquet").read_bytes()[:-100])
    records = find_records([folder], ReadOptions())
    for lanes in range(1, 5):
        shares = [list(records.open(0, None, share=Share(lane, lanes))) for lane in range(lanes)]
        problems = [record.problem for share in shares for record, _ in share if record.problem]
        assert len(problems) == 1 and "Parquet" in problems[0]
        assert sum(map(len, shares)) == len(ROWS) + 1


@pytest.mark.parametrize(
    "suffix, lanes, worlds", [("jsonl", 1, (3, 5)), ("jsonl", 4, (1, 2, 8)), ("parquet", 4, (2, 8))]
)
def test_a_state_of_another_world_is_exact(tmp_path, suffix, lanes, worlds, monkeypatch):
    monkeypatch.setattr(stream_records, "MIN_SHARE_BYTES", 1)
    folder = write(tmp_path / "files", suffix)
    common = {"lanes": lanes, "global_batch_size": 8, "steps": 40, "epochs": None}
    expected = samples(stream(folder, **common))
    for stop in (0, 17):
        states = [take_state(stream(folder, rank=rank, world_size=4, **common), stop) for rank in range(4)]
        for world_size in worlds:
            rest = {}
            for rank in range(world_size):
                created = stream(folder, rank=rank, world_size=world_size, **common)
                created.load_state_dict(states if lanes > 1 else states[rank % 4])
                batches = list(created)
                for batch in batches:
                    assert set((batch.sample_ids - 8 * batch.step).tolist()) == set(range(rank, 8, world_size))
                    assert batch.weight == len(batch) * world_size / 8
                rest.update(samples(batches))
            first = min(rest)
            assert rest == {number: row for number, row in expected.items() if number >= first}
            assert first == stop * 8 or lanes == 1


def test_states_of_too_few_ranks_or_other_lanes_are_refused(tmp_path):
    folder = write(tmp_path / "files", "jsonl")
    common = {"lanes": 4, "global_batch_size": 8, "steps": 40, "epochs": None}
    states = [take_state(stream(folder, rank=rank, world_size=4, **common), 5) for rank in range(4)]
    with pytest.raises(StateError, match=r"expected the lanes \[0, 2\] that this rank reads, got \['0'\].*all ranks"):
        stream(folder, rank=0, world_size=2, **common).load_state_dict(states[0])
    with pytest.raises(StateError, match="expected lanes 2, got 4"):
        stream(folder, rank=0, world_size=2, **{**common, "lanes": None}).load_state_dict(states)
    with pytest.raises(StateError, match="states of one step"):
        stream(folder, **common).load_state_dict([*states[:3], {**states[3], "run_step": 3}])


def test_several_lanes_need_an_end_that_all_ranks_share(tmp_path):
    folder = write(tmp_path / "files", "jsonl")
    with pytest.raises(UsageError, match=r"steps: expected the number of batches, as 2 lanes.*lanes=1"):
        stream(folder, world_size=2, epochs=1)
    with pytest.raises(UsageError, match=r"global_batch_size: expected a multiple of the world size, 2"):
        stream(folder, world_size=2, global_batch_size=3, epochs=None)
    with pytest.raises(DatasetError, match=r"of lane 300 of 600 .*lanes=1"):
        list(stream(folder, rank=300, world_size=600, steps=1, epochs=None))


def test_one_for_is_a_pass_and_take_moves_nothing(tmp_path, caplog):
    folder = write(tmp_path / "files", "jsonl")
    expected = as_tuples(stream(folder, epochs=3))
    created = stream(folder, epochs=1)
    first = created.take(3)
    assert as_tuples(first) == expected[:3] == as_tuples(first)
    result = []
    for _ in range(3):
        for batch in created:  # a break, a look, and on with the same pass
            result += as_tuples([batch])
            if batch.epoch_step == 5:
                break
        start = next(i for i, fact in enumerate(expected) if fact[3] == created.epoch)
        assert [fact[:4] for fact in as_tuples(created.take(2))] == [fact[:4] for fact in expected[start : start + 2]]
        result += as_tuples(created)
    assert [fact[:5] for fact in result] == [fact[:5] for fact in expected] and created.epoch == 3
    bounded = stream(folder, rank=1, world_size=2, steps=5, epochs=None)
    assert len(list(bounded)) == 5 and bounded.step == 5
    assert "no batch is left" not in caplog.text and list(bounded) == []
    assert caplog.messages[-1] == "stream: all 5 steps of the run were given out: no batch is left."


def test_helper_processes_of_a_rank_read_its_share(tmp_path):
    folder = write(tmp_path / "files", "jsonl")
    ranks = [stream(folder, rank=rank, world_size=2, steps=21, epochs=None) for rank in range(2)]
    helpers = [[rank.helper(index, 3) for index in range(3)] for rank in ranks]
    expected = samples(stream(folder, lanes=6, batch_size=12, steps=7, epochs=None))
    result = samples(batch for rank in helpers for helper in rank for batch in helper)
    assert result == expected and len(result) == 84
    assert all(len(list(helper)) == 0 and helper.step == 7 for rank in helpers for helper in rank)
    assert len({tuple(helper.position.lanes) for rank in helpers for helper in rank}) == 6  # one lane each


@pytest.mark.parametrize("suffix, lanes", [("jsonl", 24), ("parquet", 4), ("jsonl.gz", 3)])
def test_worlds_that_change_read_each_sample_once(tmp_path, suffix, lanes, monkeypatch):
    """Ranks that stay, that are killed, that are new; states are exchanged as workers do, or not."""
    monkeypatch.setattr(stream_records, "MIN_SHARE_BYTES", 1)
    folder, result, taken = write_files(tmp_path / "files", suffix, 3, None), {}, 0
    ranks: list = []
    for world_size, is_told in ((1, True), (4, True), (3, False), (5, True), (7, True), (30, False), (2, True)):
        survivors = ranks[: world_size // 2]
        ranks = [*survivors, *(stream(folder, epochs=None) for _ in range(world_size - len(survivors)))]
        for rank, created in enumerate(ranks):
            created.join_world(rank, world_size, 2 * world_size, taken)
        for state in [json.loads(json.dumps(rank.state_dict())) for rank in ranks] if is_told else ():
            for rank in ranks:
                rank.learn(state)
        assert not (is_told and world_size == 1 and list(ranks[0].read_on()))
        steps = [list(islice(rank, 4)) for rank in ranks]
        assert all(sum(batch.weight for batch in step) == pytest.approx(world_size) for step in zip(*steps))
        assert {rank.lanes for rank in ranks} == {lanes} and all(len(batch) for step in steps for batch in step)
        new = samples(batch for step in steps for batch in step)
        assert sorted(new) == list(range(taken, taken + 8 * world_size))
        result |= new
        taken += 8 * world_size
    alone = stream(folder, epochs=None)
    alone.join_world(0, 1, 8, 0)
    assert result == samples(islice(alone, taken // 8))
    state_after = ranks[0].state_dict()
    ranks[0].join_world(0, 1, 2, taken)
    ranks[0].learn(ranks[1].state_dict())
    assert list(ranks[0].read_on()) == [] and state_after["samples_taken"] == taken
