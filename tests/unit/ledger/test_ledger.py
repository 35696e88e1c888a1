"""The ledger notices every change and counts coverage exactly."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError
from forebay.ledger.chain import Entry, Used, read_entries
from forebay.ledger.index import Job, decode_runs, encode_runs
from forebay.ledger.verify import verify_ledger
from forebay.ledger.writer import Ledger
from support.ledgers import sign, write_job


def write(path: Path, samples: list[int], uses: list[tuple[int, ...]]):
    write_job(path, [Used("l", *use, step) for step, use in enumerate(uses)], samples, per_entry=1)


@pytest.mark.parametrize("earlier", [None, 2, "3"])
def test_a_ledger_of_another_format_is_refused(earlier):
    """The one before had keys without certificates."""
    entry = Entry(
        0, "", 5.0, "job", {"samples_per_slice": [[2, 1]], **({"format": earlier} if earlier else {})}, "", "h"
    )
    with pytest.raises(LedgerError, match=r"expected format 3, got .*start in a new directory"):
        Job.of(entry)


@pytest.mark.parametrize("use", [(0, 2, 0, 1), (0, 0, 0, 5), (0, 0, 2, 2), (0, 0, 3, 1)])
def test_use_outside_the_dataset_is_a_problem(tmp_path, use):
    write(tmp_path / "l", [4, 4], [(0, 0, 0, 4), (0, 1, 0, 4), use])
    assert not verify_ledger(tmp_path / "l").ok


def test_every_flipped_byte_and_a_removed_or_swapped_line_are_noticed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [2, 2], [(0, 0, 0, 2), (0, 1, 0, 2)])
    data = path.read_bytes()
    assert verify_ledger(path).ok
    for position in range(len(data)):
        changed = data[position] ^ (1 << position % 7)
        path.write_bytes(data[:position] + bytes([changed]) + data[position + 1 :])
        report = verify_ledger(path)
        assert not report.ok and report.problems, position
    job, worker, first, second = data.splitlines(keepends=True)
    for lines in ([job, worker, second], [job, first, worker, second], [worker, first, second], [job, worker, first]):
        path.write_bytes(b"".join(lines))
        assert not verify_ledger(path).ok


def test_a_torn_tail_is_cut_at_any_byte(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [2, 2], [(0, 0, 0, 2), (0, 1, 0, 2)])
    data = path.read_bytes()
    before = len(data) - len(data.splitlines(keepends=True)[-1])
    for size in range(before, len(data)):
        path.write_bytes(data[:size])
        with Ledger.open(path, sign) as ledger:
            assert ledger.truncated_bytes == size - before
            assert ledger.next_seq == 3
            ledger.append("note", {"a": 1})
        assert [e.kind for e in read_entries(path)] == ["job", "worker", "uses", "note"]


def test_a_broken_chain_does_not_open_and_a_second_writer_neither(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write(path, [2], [(0, 0, 0, 2)])
    with Ledger.open(path, sign), pytest.raises(LedgerError, match="another process"):
        Ledger.open(path, sign)
    path.write_bytes(path.read_bytes().replace(b'"l",0,0,0,2', b'"l",0,0,0,1'))
    with pytest.raises(LedgerError, match="hash"):
        Ledger.open(path, sign)


@given(st.lists(st.integers(0, 3), max_size=50))
def test_runs_round_trip(counts):
    assert decode_runs(encode_runs(np.array(counts, np.int64))).tolist() == counts
    assert decode_runs(counts).tolist() == counts


@pytest.mark.parametrize("runs", [None, [[1]], [[-1, 2]], [["a", 2]], [[1, 10**12]], [[True, 1]]])
def test_bad_runs_are_refused(runs):
    with pytest.raises(LedgerError):
        decode_runs(runs)
