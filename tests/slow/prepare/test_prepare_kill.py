"""A prepare that is killed does not do finished work again, and leaves nothing running."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import whole

_SCRIPT = """
import functools
import sys
from forebay import prepare_dataset
from forebay.prepare import driver as pipeline, load_recipe
from forebay.prepare.tasks import text
from forebay.prepare import inputs as sources

sources.GROUP_BYTES = 1 << 15
RECIPE = {
    "name": "d", "gopher_repetition": {"max_duplicate_lines": 1}, "unicode": {}, "tokenize": {"tokenizer": "train:600"},
    "dedup": {"exact": True, "minhash": True}, "slice": {"bytes": 1 << 15, "shuffle": True},
}
if __name__ == "__main__":
    source, out, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    print(prepare_dataset([source], out, recipe=load_recipe(settings=RECIPE), workers=workers).id)
"""

# Half of the tasks stay undone until the kill, however late it comes.
_PAUSED = """
import time
from pathlib import Path

original = text.process_split

@functools.wraps(original)
def paused(task, scale):
    if len(list(Path(sys.argv[2], ".work/done/process_split").glob("*.json"))) >= 40:
        time.sleep(3600)
    return original(task, scale)

text.process_split = pipeline.process_split = paused
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 MB of made-up words in files of 8 KiB."""
    folder = tmp_path_factory.mktemp("source")
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(900)]
    for i in range(240):
        (folder / f"{i:04d}.txt").write_text(" ".join(rng.choices(words, k=1300)))
    return folder


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "run.py"
    path.write_text(_SCRIPT.replace("if __name__ ==", f"{_PAUSED}if __name__ =="))
    return path


def start(script: Path, source: Path, out: Path, workers: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), str(source), str(out), str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def marks(out: Path) -> dict[Path, int]:
    """Each finished task's mark and when it was made."""
    result = {}
    for folder, _, names in os.walk(out):  # which passes over what goes away meanwhile
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.match(".work/done/*/*.json") or path.match("slices/0*.safetensors"):
                    result[path] = path.stat().st_mtime_ns
    return result


def test_finished_tasks_are_not_run_again(tmp_path: Path, source: Path, script: Path) -> None:
    out = tmp_path / "d"
    process = start(script, source, out, 1)
    while len(marks(out)) < 10 and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    done = {path.stem for path in (out / ".work/done/process_split").glob("*.json")}
    assert done, "killed too early or too late to tell"
    code = _SCRIPT.replace(
        'if __name__ == "__main__":',
        "original = text.process_split\n"
        "@functools.wraps(original)\n"
        "def noted(task, scale):\n    print('ran', task.name, file=sys.stderr)\n    return original(task, scale)\n"
        'pipeline.process_split = noted\nif __name__ == "__main__":',
    )
    path = tmp_path / "noted.py"
    path.write_text(code)
    run = subprocess.run(
        [sys.executable, str(path), str(source), str(out), "1"], capture_output=True, text=True, check=True
    )
    ran = {line.split()[1] for line in run.stderr.splitlines() if line.startswith("ran ")}
    num_tasks = 80  # three files of about 9 KB in each
    assert ran and not ran & done and len(ran | done) == num_tasks


def test_interrupt_leaves_no_process(tmp_path: Path, source: Path, script: Path) -> None:
    process = start(script, source, tmp_path / "d", 2)
    while len(marks(tmp_path / "d")) < 3 and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    whole.wait_for_none(process.pid)


_INTERRUPTED = """
import multiprocessing, os, signal, time
from multiprocessing.context import ForkProcess
from forebay.prepare.engines import local

start = ForkProcess.start


def interrupted(process):
    start(process)
    os.kill(os.getpid(), signal.SIGINT)


multiprocessing.set_start_method("fork")
ForkProcess.start = interrupted
local._serve = lambda pipe, log: time.sleep(60)  # It has not come to remove its log.
with local.LocalEngine(2) as engine:
    engine.map(max, [1, 2], print)
"""


def test_interrupt_while_a_worker_is_started_leaves_no_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr
    assert list(tmp_path.iterdir()) == []
