"""Settings that workers of a coordinator share, and a worker that is stopped while it waits for others."""

import asyncio
from typing import Any

import pytest

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import Coordinator
from forebay.errors import UsageError
from forebay.worker import WorkerClient, WorkerConfig
from forebay.worker.distributed import merge_settings, shared_settings
from support.waiting import until

PATIENT = {"stale_s": 600.0, "lost_s": 600.0}


def run_alone(config: WorkerConfig, lines: list[str]) -> Any:
    async def run():
        async with WorkerClient(config, log=lines.append) as worker:
            return await worker.run_training(use_distributed=True)

    return asyncio.run(run())


def test_settings_of_the_coordinator_override_those_of_a_worker(tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "line {i} of many"}}\n' for i in range(500)))
    shared = {"dataset_name": str(tmp_path / "texts.jsonl"), "tokenizer_name": "bytes"}
    shared |= {"batch_size": 6, "seq_len": 8, "num_steps": 5}
    lines = []
    with Coordinator("127.0.0.1", 0, config=shared, rules=Rules(**PATIENT)) as coordinator:
        config = WorkerConfig(batch_size=2, seq_len=16, trainer="count", coordinator=coordinator.address)
        report = run_alone(config, lines)
        run_alone(config, lines)
    assert lines[-1].startswith("nothing to do: the run's 5 steps were done before")
    assert (report.finished, report.tokens, report.effective_batch_size) == (True, 5 * 6 * 8, 6)
    assert any("batch_size" in line for line in lines)
    assert any(line.startswith("seq_len: the run has 8, which overrides 16 of") for line in lines)
    assert any("effective batch size 6 (6 x 1)" in line for line in lines)


def test_a_worker_that_waits_for_others_can_be_stopped():
    async def run(coordinator: Coordinator):
        worker = WorkerClient(WorkerConfig(trainer="count", coordinator=coordinator.address))
        await worker.start()
        running = asyncio.create_task(worker.run_training(use_distributed=True))
        await asyncio.to_thread(until, lambda: coordinator.status()["members"])
        await worker.stop()
        return await running

    with Coordinator("127.0.0.1", 0, rules=Rules(min_workers=2, **PATIENT)) as coordinator:
        report = asyncio.run(run(coordinator))
    assert not report.finished and report.steps == 0


def test_a_worker_without_the_runs_model_is_refused():
    refused = pytest.raises(UsageError, match="Give each worker of the run the same model_size")
    with Coordinator("127.0.0.1", 0, config={"model_size": "tiny"}, rules=Rules(**PATIENT)) as coordinator, refused:
        run_alone(WorkerConfig(coordinator=coordinator.address), [])


def test_settings_that_workers_share():
    assert shared_settings(WorkerConfig(device="cpu"))["model_size"] == "tiny"
    config = WorkerConfig(dataset_name="pile")
    shared = shared_settings(config)
    needed = {"dataset_type": "huggingface", "batch_size": 4, "num_steps": 100, "seed": 42}
    assert shared == {**needed, "dataset_name": "pile"}
    assert merge_settings(config, shared) == config and merge_settings(config, shared).resolved_seq_len() == 2048
    named = merge_settings(
        WorkerConfig(), {"dataset_type": "dummy", "dataset_name": "fineweb", "batch_size": 2, "other": 1}
    )
    assert (named.dataset_type, named.dataset_name, named.resolved_seq_len()) == ("huggingface", "fineweb", 1024)
    assert merge_settings(config, {**shared, "dataset_type": "dummy"}).dataset_name is None
