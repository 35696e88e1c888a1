"""The demo as a user runs it: it ends well, it cleans up, and Ctrl-C at any moment cleans up too."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from forebay.demo import NodeProcess
from support.calibration import scaled

# Numbered below, so that no two slices are alike: alike slices travel once.
TEXT = "The mill race turns the wheel, and the wheel turns the stone. "


# Each worker stops after less than half of the batches until one of them has died, so that the demo has one to kill
# however slow this machine is.
PROGRAM = """
import json, os, time
from pathlib import Path

import psutil

import forebay
from forebay.worker.trainer import CountTrainer

HERE = Path(__file__).parent / "workers"


def alive(path):
    try:
        return psutil.Process(int(path.name)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


loader = forebay.Loader()
trainer = CountTrainer(loader.dataset.manifest.vocab_size)
for step, batch in enumerate(loader):
    HERE.mkdir(exist_ok=True)
    (HERE / str(os.getpid())).touch()
    while step > 450 and all(map(alive, HERE.iterdir())):
        time.sleep(0.01)
    print(json.dumps({"loss": trainer.step(batch.inputs, batch.labels)}), flush=True)
"""


def demo(tmp_path: Path, *more: object, program: Sequence[str] = ("-m", "forebay")) -> subprocess.Popen[str]:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i:02}.txt").write_text("".join(f"{i}.{j} {TEXT}" for j in range(400)))
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, *program, "demo", "--input", str(corpus), *map(str, more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
    )


def left_behind(tmp_path: Path) -> list[str]:
    """Processes and files that the demo should have taken with it."""
    mine = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    return [" ".join(c) for c in mine if str(tmp_path) in " ".join(c)] + [str(p) for p in (tmp_path / "tmp").iterdir()]


def test_demo_proves_exactly_once_though_a_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["--", sys.executable, tmp_path / "program.py"]
    process = demo(tmp_path, "--json", tmp_path / "summary.json", "--tokenizer", "bytes", *command)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert out.strip().splitlines()[-1] == "demo: ok"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ok"] and summary["documents_out"] == 40 and summary["slices"] >= 30
    (epoch,) = summary["ledger"]["epochs"]
    assert epoch["samples"] > 0 and epoch["missing"] == 0 and epoch["repeated"] == 0
    assert summary["workers"]["worker-1"]["killed"] and "worker-3" in summary["workers"]
    assert summary["loss_to"] < summary["loss_from"]
    # Each slice travels once, and once more only if the killed worker had it, or one that stood still and lost it.
    lost = sum(worker.get("leases_lost", 0) for worker in summary["workers"].values())
    assert summary["bytes"] <= summary["bytes_served"]["data node"] < (1.25 + 0.25 * lost) * summary["bytes"]
    assert left_behind(tmp_path) == []


def test_a_process_ends_with_its_parent_though_it_is_not_told(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path, "dht", "dht", "--nodes", "4")
    node.wait_ready()
    assert node.popen.stdin is not None
    node.popen.stdin.close()
    assert node.popen.wait() == 0


@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_at_any_moment_leaves_nothing(tmp_path: Path, seed: int) -> None:
    # What the interpreter does before our first line, also with an interrupt, is its own.
    started = "from forebay.__main__ import run; print('started', flush=True); run()"
    process = demo(tmp_path, program=("-c", started))
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    time.sleep(random.Random(seed).uniform(0.0, 9.0))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode in (0, 130), out + err
    assert "Traceback" not in err, err
    assert left_behind(tmp_path) == []


INTERRUPTED = """
import os, signal, subprocess, sys
from contextlib import ExitStack
from pathlib import Path

from forebay import demo


class Popen(subprocess.Popen):
    def _execute_child(self, *args):
        super()._execute_child(*args)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGINT)


subprocess.Popen = Popen
with ExitStack() as stack:
    demo._train_on_network(stack, Path(sys.argv[1]), 1 << 20, ())
"""


def test_ctrl_c_while_a_process_is_started_ends_that_too(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, tmp_path], capture_output=True, text=True)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt") and len(done.stdout.split()) == 1, done.stderr
    assert not psutil.pid_exists(int(done.stdout))


def test_a_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    process = demo(tmp_path)
    time.sleep(6)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + scaled(30)
    while (remaining := [c for c in left_behind(tmp_path) if " forebay " in c]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert remaining == []
