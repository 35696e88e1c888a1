"""Records of runs: bounded, readable after a kill, one file a process."""

import contextlib
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli import main
from forebay.errors import ProtocolError, UsageError
from forebay.observe.record import RecordReader, RunRecord
from forebay.observe.sources import NodeSource
from support.views import view

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip


def test_a_full_file_is_thinned_and_its_interval_doubles(tmp_path):
    record = RunRecord(tmp_path, interval_s=1.0, max_bytes=20_000)
    for moment in range(3000):
        record.add(view(float(moment)))
        assert record.path.stat().st_size <= 20_000
    times = RecordReader(tmp_path).times()
    assert 20 < len(times) < 100 and times == sorted(times) and times[0] < 100 and times[-1] > 2900
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= 2.5 * min(gaps)


def test_views_that_follow_too_soon_are_not_written(tmp_path):
    record = RunRecord(tmp_path, interval_s=2.0)
    for tenth in range(100):
        record.add(view(tenth / 10))
    assert len(RecordReader(tmp_path).times()) in (5, 6)


def test_ranks_share_a_folder_and_are_merged(tmp_path):
    for rank in range(3):
        record = RunRecord(tmp_path, f"rank-{rank}")
        for moment in (10.0, 20.0, 30.0):
            record.add(view(moment + 0.1 * rank, rank))
    reader = RecordReader(tmp_path)
    assert reader.times() == [10.0, 20.0, 30.0]
    merged = reader.view_at(20.0)
    assert [row["name"] for row in merged["workers"]] == ["rank 0", "rank 1", "rank 2"]
    assert merged["figures"]["throughput"] == (600.0, "tokens/s")
    assert merged["waits"] == {"network": pytest.approx(0.2)} and "network" in merged["advice"]
    assert reader.latest()["at"] == pytest.approx(30.2)


def test_lines_that_were_cut_are_ignored_and_the_next_process_goes_on(tmp_path):
    record = RunRecord(tmp_path)
    record.add(view(1.0))
    with record.path.open("ab") as file:
        file.write(b'{"at":5.0,"kind":"lo')
    reader = RecordReader(tmp_path)
    assert reader.times() == [1.0] and reader.latest()["at"] == 1.0
    RunRecord(tmp_path).add(view(9.0))
    assert reader.times() == [1.0, 9.0] and RecordReader(tmp_path).times() == [1.0, 9.0]
    assert [json.loads(line)["at"] for line in record.path.read_bytes().splitlines() if line.endswith(b"}")] == [
        1.0,
        9.0,
    ]


def test_a_folder_without_a_record_and_one_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(UsageError, match="expected a folder with the record of a run"):
        RecordReader(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        RunRecord(tmp_path / "file" / "record")
    RunRecord(tmp_path / "empty")
    with pytest.raises(UsageError, match="got none yet"):
        RecordReader(tmp_path / "empty").latest()


@pytest.mark.parametrize(
    "line", [b'{"at":1.0}', b'{"at":1.0,"title":7,"state":[],"workers":3}', b'{"at":1.0,"figures":{"x":1}}']
)
def test_a_record_of_another_shape_is_one_line_of_error(line, tmp_path, capsys):
    (tmp_path / "x.views.jsonl").write_bytes(line + b"\n")
    assert main(["top", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "are not of this version" in error


@given(st.dictionaries(st.sampled_from(["samples_used", "members", "workers", "providers", "name", "peers"]), JSON))
def test_a_node_that_answers_anything_is_a_protocol_error_or_a_view(status):
    source = NodeSource("127.0.0.1:1", lambda address: status)
    with contextlib.suppress(ProtocolError):
        assert isinstance(source.poll(), dict)
