"""Streams over real files of each format: exact resume anywhere, damage skipped."""

import gzip
import json
from collections import Counter

import pytest

from forebay.errors import PrepareError
from support.streams import ROWS, WRITERS, as_tuples, jsonl, samples, stream, take_state, write_files

SETTINGS = {"lanes": 1, "global_batch_size": 12, "seq_len": 64}


@pytest.mark.parametrize("suffix", WRITERS)
def test_each_document_once_and_resume_is_exact(tmp_path, suffix):
    folder = write_files(tmp_path / "files", suffix, 3)
    tokens = sorted(samples(stream(folder, lanes=1, seq_len=1, global_batch_size=512)).items())
    text = bytes(0 if inputs[0] == 256 else inputs[0] for _, (inputs, _) in tokens).decode()
    assert Counter(text.split("\0")[:-1]) == Counter(row["text"] for row in ROWS)
    for shuffle in (False, True):
        settings = {**SETTINGS, "epochs": 2, "shuffle": shuffle}
        full, running = as_tuples(stream(folder, **settings)), stream(folder, **settings)
        states = [running.state_dict(), *(running.state_dict() for _ in running)]
        for stop in (1, len(full) // 2, len(full) - 2):
            second = stream(str(folder / "*"), **settings)
            second.load_state_dict(json.loads(json.dumps(states[stop])))
            assert as_tuples(second) == full[stop:]


def test_malformed_records_are_counted_with_their_place(tmp_path):
    lines = jsonl(ROWS[:40]).splitlines(keepends=True)
    lines[7], lines[20], lines[30] = b'{"text": "broken\n', b'{"no_text": 1}\n', b"\n"
    (tmp_path / "bad.jsonl").write_bytes(b"".join(lines))
    full = gzip.compress(jsonl(ROWS[40:]))
    (tmp_path / "cut.jsonl.gz").write_bytes(full[: len(full) * 3 // 4])
    created = stream(tmp_path, shuffle=False, **SETTINGS)
    expected = as_tuples(created)
    assert created.stats()["malformed"] == 3
    reported = [(invalid.name.rpartition("/")[2], invalid.location) for invalid in created.malformed]
    assert reported[:2] == [("bad.jsonl", f"byte {sum(map(len, lines[:i]))}") for i in (7, 20)]
    assert reported[2][0] == "cut.jsonl.gz" and "it ends early" in created.malformed[2].problem
    for stop in range(0, len(expected), 5):
        second = stream(tmp_path, shuffle=False, **SETTINGS)
        second.load_state_dict(take_state(stream(tmp_path, shuffle=False, **SETTINGS), stop))
        assert as_tuples(second) == expected[stop:]
        assert second.stats()["malformed"] == 3


def test_a_file_that_is_removed_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS))
    created = stream(path, prefetch_batches=2)
    path.unlink()
    with pytest.raises(PrepareError, match=r"a\.jsonl"):
        list(created)
