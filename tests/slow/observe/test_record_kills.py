"""A process that records a run is killed: what it had written can be read, and the next process goes on."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

from forebay.observe.record import RecordReader, RunRecord
from support.views import view
from support.waiting import until


def write_until_killed(folder: Path):
    record = RunRecord(folder, interval_s=0.0, max_bytes=50_000)
    for number in range(10_000_000):
        record.add(view(float(number)))


def test_a_kill_at_any_moment_leaves_a_record(tmp_path):
    for turn in range(6):
        process = multiprocessing.get_context("spawn").Process(target=write_until_killed, args=(tmp_path,))
        process.start()
        until(lambda: any(path.stat().st_size for path in tmp_path.glob("*.views.jsonl")))
        time.sleep(0.02 + 0.05 * turn)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        reader = RecordReader(tmp_path)
        times = reader.times()
        assert all(reader.view_at(moment)["kind"] == "loader" for moment in times)
    assert times
