"""The coordinator's store of a run: what cannot be written changes nothing."""

import contextlib

import pytest

from forebay.coordinator.messages import LogLine, Rules, RunState
from forebay.coordinator.store import RunStore
from forebay.errors import StateError


def test_a_write_that_fails_leaves_the_roster_as_it_was(tmp_path):
    with contextlib.closing(RunStore(tmp_path)) as store:
        state, run_id = store.load(Rules(), {}, 0.0, "run")
        (pages,) = store._database.execute("PRAGMA page_count").fetchone()
        store._database.execute(f"PRAGMA max_page_count={pages}")
        large = RunState(state.rules, {}, {"key": "x" * 100_000})
        with pytest.raises(StateError, match=r"cannot write .*roster\.sqlite: database or disk is full"):
            store.save(large, [LogLine("lost")], run_id)
        assert store.load(Rules(), {}, 0.0, "run")[0].config == {}
        store._database.execute("PRAGMA max_page_count=1000000")
        store.save(large, [LogLine("written")], run_id)
        assert store.load(Rules(), {}, 0.0, "run")[0].config == large.config
        store._database.execute("UPDATE state SET body = json_remove(body, '$.version')")
        with pytest.raises(StateError, match=r"another version, or damaged: KeyError"):
            store.load(Rules(), {}, 0.0, "run")
