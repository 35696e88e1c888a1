"""A loader that reads a dataset over HTTP, killed with SIGKILL and resumed from its state in a new process."""

import json
import subprocess
import sys
from typing import Any

from forebay import Loader
from support.feeding import check_cache, make_dataset
from support.origin_server import OriginServer

NUM_SLICES, SAMPLES, SEQ_LEN = 6, 16, 512
ORDER = {"seq_len": SEQ_LEN, "global_batch_size": 8, "seed": 3, "epochs": 2}

PROGRAM = """
import json, sys
from forebay import Loader
arguments, state = map(json.loads, sys.argv[1:])
with Loader(**arguments) as loader:
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        print(json.dumps([batch.sample_ids.tolist(), batch.inputs.tolist(), loader.state_dict()]), flush=True)
        sys.stdin.readline()
"""


def read_batches(arguments: dict, state: Any, num_batches: int, *, kill: bool) -> list:
    """[sample ids, inputs, state] of the next batches of a process, which waits for a line after each."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments), json.dumps(state)]
    lines = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(num_batches):
                lines.append(json.loads(process.stdout.readline()))
                if not kill or len(lines) < num_batches:
                    print(file=process.stdin, flush=True)
            assert kill or process.stdout.read() == ""
        finally:
            if kill:
                process.kill()
    assert process.returncode == (-9 if kill else 0)
    return lines


def test_a_killed_loader_resumes_from_its_state_with_the_batches_of_an_uninterrupted_one(tmp_path):
    dataset = make_dataset(tmp_path / "data", NUM_SLICES, SAMPLES, SEQ_LEN)
    expected = [[batch.sample_ids.tolist(), batch.inputs.tolist()] for batch in Loader(dataset, **ORDER)]
    assert len(expected) == 2 * NUM_SLICES * SAMPLES // 8
    cache = tmp_path / "cache"
    with OriginServer(dataset) as server:
        arguments = {**ORDER, "dataset": server.url, "cache_dir": str(cache), "cache_bytes": 1 << 20}
        first = read_batches(arguments, None, 3, kill=True)
        check_cache(cache)
        second = read_batches(arguments, first[-1][2], 8, kill=True)
        check_cache(cache)
        last = read_batches(arguments, second[-1][2], len(expected) - 11, kill=False)
    assert [line[:2] for line in first + second + last] == expected
    assert check_cache(cache) == NUM_SLICES
