"""`forebay demo` as a user runs it: a worker is killed, each sample is used once, and nothing stays behind."""

import json
import sys

from support.demos import remaining, start_demo

# A worker stops after less than half of the batches until one of them is dead: the demo always has one to kill.
PROGRAM = """
import json, os, time
from pathlib import Path

import psutil

import forebay

WORKERS = Path(__file__).parent / "workers"


def is_alive(path):
    try:
        return psutil.Process(int(path.name)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


for step, batch in enumerate(forebay.Loader()):
    WORKERS.mkdir(exist_ok=True)
    (WORKERS / str(os.getpid())).touch()
    while step > 110 and all(map(is_alive, WORKERS.iterdir())):
        time.sleep(0.01)
    print(json.dumps({"loss": 9.0 - step}), flush=True)
"""


def test_the_ledger_proves_that_each_sample_was_used_once_though_a_worker_was_killed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["--", sys.executable, tmp_path / "program.py"]
    process = start_demo(tmp_path, "--json", "--tokenizer", "bytes", *command, lines=100)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    summary = json.loads(out)
    assert summary["ok"] and summary["documents_out"] == 40 and summary["slices"] >= 30
    (epoch,) = summary["ledger"]["epochs"]
    assert epoch["samples"] > 2 * 110 * 8 and epoch["missing"] == epoch["repeated"] == 0
    assert summary["workers"]["worker-1"]["killed"] and "worker-3" in summary["workers"]
    assert summary["loss_to"] < summary["loss_from"]
    assert summary["bytes"] <= summary["bytes_served"]["data node"]
    assert remaining(tmp_path) == []
