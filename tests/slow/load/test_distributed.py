"""Workers of a coordinator: ranks and settings come from it, a killed one costs no sample, a newcomer takes over."""

import hashlib
import json
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import islice
from pathlib import Path

import pytest

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import Coordinator
from forebay.worker import create_huggingface_dataset
from support.waiting import until

WORKER = """
import asyncio, hashlib, json, os, signal, sys, time
from forebay.worker import WorkerClient, WorkerConfig
from support.paths import ROOT

def on_step(step, batch, loss):
    report = worker.report
    rows = [hashlib.sha256(row.tobytes()).hexdigest() for row in batch.inputs]
    line = [step, report.rank, report.world_size, batch.epoch, batch.sample_ids.tolist(), rows]
    print(json.dumps(line), flush=True)
    while step == 15 and not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    time.sleep(0.02 * (step > 15))  # So that the news of the others is here before the last step.
    if step + 1 == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with worker:
        await worker.run_training(use_distributed=True)

config = WorkerConfig(
    worker_id=sys.argv[1], dataset_name=sys.argv[4], tokenizer_name="bytes", seq_len=16, shuffle_buffer=20,
    batch_size=2, num_steps=40, trainer="count", timeout_s=20,
)
worker = WorkerClient(config, log=lambda line: None, on_step=on_step)
asyncio.run(main())
"""


def texts(folder: Path, lines: int = 500) -> Path:
    """Short texts, each of its own."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {i} of many"}) + "\n" for i in range(lines)))
    return path


def start(worker_id: str, die_after: int, out: Path) -> subprocess.Popen[bytes]:
    """A worker that waits after step 15 until the folder has a file `all-here`."""
    with out.open("ab") as file:
        arguments = [worker_id, str(die_after), str(out.parent / "all-here"), str(out.parent / "texts.jsonl")]
        return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdout=file)


def read_steps(folder: Path) -> dict[int, list]:
    """(rank, world size, epoch, sample ids, hashes of their tokens) of each worker's step."""
    result = defaultdict(list)
    for path in folder.glob("*.out"):
        for line in path.read_text().splitlines():
            step, *rest = json.loads(line)
            result[step].append(tuple(rest))
    return result


def test_a_killed_worker_costs_no_sample_and_others_may_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text that is read several times over; each sample has the tokens that one process alone gives it."""
    texts(tmp_path, lines=100)
    rules = Rules(min_workers=2, heartbeat_s=1.0, stale_s=60.0, lost_s=2.0)
    with Coordinator("127.0.0.1", 0, rules=rules) as coordinator:
        monkeypatch.setenv("FOREBAY_COORDINATOR", coordinator.address)
        workers = [start("w1", 0, tmp_path / "w1.out"), start("w2", 10, tmp_path / "w2.out")]
        assert workers.pop().wait() == -9
        workers.append(start("w3", 0, tmp_path / "w3.out"))
        workers.append(start("w2", 0, tmp_path / "again.out"))
        until(lambda: len([item for item in coordinator.status()["members"] if not item["lost"]]) == 3)
        (tmp_path / "all-here").touch()
        assert [worker.wait() for worker in workers] == [0, 0, 0]
    steps = read_steps(tmp_path)
    assert sorted(steps) == list(range(40))
    samples = {}
    for step in steps.values():
        ranks = [rank for rank, *_ in step]
        assert len({(world, epoch) for _, world, epoch, *_ in step}) == 1 and len(ranks) == len(set(ranks))
        for _, _, _, ids, rows in step:
            for sample, row in zip(ids, rows):
                assert samples.setdefault(sample, row) is row
    assert {world for _, world, *_ in steps[39]} == {3} and len(steps[39]) == 3
    lone = create_huggingface_dataset(
        str(tmp_path / "texts.jsonl"), tokenizer_name="bytes", seq_len=16, buffer_size=20, batch_size=1,
        num_batches=1000,
    )  # fmt: skip
    expected = {
        int(b.sample_ids[0]): hashlib.sha256(b.inputs[0].tobytes()).hexdigest() for b in islice(lone.batches(), 400)
    }
    assert samples.items() <= expected.items() and {epoch for step in steps.values() for *_, epoch, _, _ in step} >= {
        0,
        1,
    }


def test_control_c_ends_a_worker_after_its_step() -> None:
    command = [sys.executable, "-m", "forebay.worker", "--trainer", "count", "--num-steps", "100_000_000"]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while "first batch" not in worker.stderr.readline():
        assert worker.poll() is None
    worker.send_signal(signal.SIGINT)
    _, message = worker.communicate()
    assert worker.returncode == 130 and "stopped: step " in message and message.endswith("interrupted\n")
