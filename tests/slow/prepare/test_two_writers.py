"""A task that two processes run at once on one working directory, as when a cluster takes a slow node for lost."""

import subprocess
import sys

import pytest

SCRIPT = """
import contextlib, os, pickle, sys
from pathlib import Path
from forebay import prepare_dataset
from forebay.prepare import driver as pipeline, load_recipe
from support.outputs import hashes

PROCESSES = 2


class Twice:
    '''Runs every task in two processes, which begin at one moment.'''

    def map(self, run, tasks, on_done, weights=None):
        for index, task in enumerate(tasks):
            gate, opened = os.pipe()
            results = [self.start(run, task, gate, opened) for _ in range(PROCESSES)]
            os.close(gate)
            os.close(opened)
            found = [pickle.loads(os.fdopen(result, "rb").read()) for result in results]
            assert [os.wait()[1] for _ in results] == [0] * PROCESSES and found[0][0] == found[1][0], task
            on_done(index, found[0])

    def start(self, run, task, gate, opened):
        result, answer = os.pipe()
        if os.fork():
            os.close(answer)
            return result
        try:
            os.close(opened)
            os.read(gate, 1)
            os.write(answer, pickle.dumps(run(task, 0)))
            os._exit(0)
        finally:
            os._exit(1)


def made(folder, to):
    recipe = load_recipe(settings={
        "name": "d", "dedup": {"exact": True, "minhash": True, "lines": True},
        "tokenize": {"tokenizer": "bytes"}, "slice": {"shuffle": to == "dataset", "bytes": 16384},
    })
    prepare_dataset([source], folder, recipe=recipe, workers=1, to=to, document_ids=to == "dataset")
    return hashes(folder)


home, to = Path(sys.argv[1]), sys.argv[2]
source = home / "in.jsonl"
LINE = '{"text": "line %d of words\\\\nanother line %d of some length"}\\n'
source.write_text("".join(LINE % (i % 7, i) for i in range(3000)))
once = made(home / "once", to)
pipeline.open_engine = lambda *arguments: contextlib.nullcontext(Twice())
twice = made(home / "twice", to)
assert once == twice and len(once) > 3, (once, twice)
"""


@pytest.mark.parametrize("to", ["dataset", "parquet"])
def test_two_processes_run_each_task_at_once(tmp_path, to: str):
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path, to])
    assert done.returncode == 0
