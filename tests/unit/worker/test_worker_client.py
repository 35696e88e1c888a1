"""Settings and who goes before whom, the client, the command line, advice."""

import asyncio
import dataclasses
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import UsageError
from forebay.worker import WorkerClient, WorkerConfig
from forebay.worker.config import SIZES
from forebay.worker.flags import main
from forebay.worker.trainer import CountTrainer
from forebay.worker.training import OutOfMemoryError, Training, is_out_of_memory, out_of_memory, trainer_class
from support.preparing import write_jsonl

COUNT = {"trainer": "count", "num_steps": 6}


def train(config: WorkerConfig):
    async def run():
        async with WorkerClient(config, log=print) as worker:
            await worker.run_training()

    asyncio.run(run())


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", [f"the {i}th line of the text" for i in range(400)])


def test_the_defaults_of_the_guide():
    config = WorkerConfig()
    batches = [WorkerConfig(batch_size=size).effective_batch_size(world) for world, size in ((4, 8), (8, 4), (16, 2))]
    assert batches == [32, 32, 32]
    assert (config.dataset_type, config.dataset_name, config.tokenizer_name) == ("dummy", None, None)
    assert (config.batch_size, config.seq_len, config.num_steps) == (4, 32, 100)
    assert set(SIZES) == {"tiny", "small", "medium"} and config.resolved_trainer() == "count"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch_size = 8


@pytest.mark.parametrize(
    "settings, seq_len",
    [
        ({}, 32),
        ({"dataset_name": "pile"}, 2048),
        ({"dataset_name": "bigcode/the-stack", "seq_len": 2048}, 2048),
        ({"dataset_name": "someone/something"}, 512),
    ],
)
def test_given_goes_before_the_datasets_own(settings, seq_len):
    config = WorkerConfig(**settings)
    assert config.dataset_type == ("huggingface" if "dataset_name" in settings else "dummy")
    assert config.resolved_seq_len() == seq_len
    assert dataclasses.replace(config, batch_size=9).resolved_seq_len() == seq_len


@pytest.mark.parametrize(
    "settings, words",
    [
        ('{"dataset_type": "web"}', "dummy, distributed_dummy, huggingface, got 'web'"),
        ('{"model_size": "huge"}', "'tiny', 'small', 'medium', got 'huge'"),
        ('{"dataset_type": "huggingface"}', "dataset_name"),
        ('{"dataset_type": "distributed_dummy", "dataset_name": "pile"}', "dataset_name"),
        ('{"batch_size": 0}', "batch_size"),
        ('{"seq_len": null}', "seq_len"),
        ('{"num_steps": 1.5}', "num_steps"),
        ('{"worker_id": " "}', "worker_id"),
        ('{"learning_rate": 0}', "learning_rate"),
    ],
)
def test_what_cannot_be_is_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        WorkerConfig(**json.loads(settings))


@pytest.mark.parametrize("dataset_type", ["dummy", "distributed_dummy"])
def test_dummies_train_without_any_framework(dataset_type):
    lines = []

    async def run():
        config = WorkerConfig(dataset_type=dataset_type, batch_size=8, **COUNT)
        async with WorkerClient(config, log=lines.append) as worker:
            report = await worker.run_training()
            with pytest.raises(UsageError, match="finished run"):
                await worker.run_training()
            return report

    report = asyncio.run(run())
    assert (report.finished, report.steps, report.samples, report.tokens) == (True, 6, 48, 48 * 32)
    assert (report.rank, report.world_size, report.effective_batch_size, len(report.losses)) == (0, 1, 8, 6)
    assert lines[1].startswith("rank 0 of 1: effective batch size 8 (8 x 1)")
    assert lines[-1].startswith("done: step 6/6")


def test_a_client_may_be_stopped_go_on_and_begin_anew(corpus):
    async def run():
        config = WorkerConfig(
            dataset_name=str(corpus), tokenizer_name="bytes", seq_len=8, trainer="count", num_steps=10**6
        )
        worker = WorkerClient(config, log=lambda line: None)
        with pytest.raises(UsageError, match="start"):
            await worker.run_training()
        await worker.start()
        running = asyncio.create_task(worker.run_training())
        while not worker.report.steps:
            await asyncio.sleep(0.01)
        with pytest.raises(UsageError, match="one run_training"):
            await worker.run_training()
        await worker.stop()
        report = await running
        assert not report.finished and report.steps > 0
        steps = report.steps
        running = asyncio.create_task(worker.run_training())
        while worker.report.steps == steps:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert worker.report.steps > steps
        await worker.start()
        assert worker.report.steps == 0
        await worker.stop()
        await worker.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"trainer": "count", "model_size": "medium", "device": "cuda"}, ["model_size, device"]),
        ({"shuffle_buffer": 2, "streaming": True, "timeout_s": 1}, ["streaming, shuffle_buffer", "timeout_s"]),
        ({"dataset_name": "", "shuffle_buffer": 2, "tokenizer_name": "bytes"}, []),
    ],
)
def test_settings_without_effect_are_named(corpus, settings, named):
    lines: list[str] = []
    settings = {**settings, "dataset_name": str(corpus)} if "dataset_name" in settings else settings
    Training(WorkerConfig(num_steps=1, **settings), threading.Event(), lines.append).run()
    assert [line.partition(":")[0] for line in lines if "without effect" in line] == named


def test_a_setting_of_a_model_trains_one(corpus, monkeypatch):
    torch, lines = pytest.importorskip("torch"), []
    config = WorkerConfig(
        dataset_name=str(corpus), tokenizer_name="bytes", seq_len=8, num_steps=9, model_size="tiny", batch_size=64
    )
    report = Training(config, threading.Event(), lines.append).run()
    assert "a GPT of " in lines[0] and report.losses[-1] < report.losses[0] - 1
    assert WorkerConfig(learning_rate=1e-3).resolved_trainer() == WorkerConfig(device="cpu").resolved_trainer() == "gpt"
    trainer, ids = trainer_class("gpt")(300, 8, model_size="small"), torch.arange(8)[None]
    assert torch.equal(trainer.model(ids)[:, :5], trainer.model(ids * (ids < 5))[:, :5]), "a place sees none after it"
    assert trainer.step(ids.numpy(), np.full((1, 8), -100)) == 0.0
    with pytest.raises(UsageError, match="device: expected a device of PyTorch"):
        trainer_class("gpt")(300, 8, device="nowhere")
    trainer_class.cache_clear()
    monkeypatch.setitem(sys.modules, "forebay.worker.gpt", None)
    with pytest.raises(UsageError, match="model_size: training a GPT needs"):
        trainer_class("gpt")


def test_out_of_memory_is_told_with_what_to_try(monkeypatch):
    torch = pytest.importorskip("torch")

    def short(self, inputs, labels):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(CountTrainer, "step", short)
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory") as reported:
        train(WorkerConfig(batch_size=8, seq_len=1024, model_size="medium", **COUNT))
    for words in ("batch_size=8, seq_len=1024", "Try batch_size=4, or seq_len=512, or model_size='small'"):
        assert words in str(reported.value)
    error = reported.value
    assert isinstance(error, OutOfMemoryError)
    assert type(error.__cause__).__name__ == "OutOfMemoryError"


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(ValueError("out of memory"))
    assert "a device with more memory" in str(out_of_memory(MemoryError(), WorkerConfig(batch_size=1, seq_len=16)))


def test_the_command_line(corpus, tmp_path, capsys, monkeypatch):
    settings = tmp_path / "worker.toml"
    settings.write_text('tokenizer-name = "bytes"\nseq_len = 16\nbatch_size = 3\nnum_steps = 4\ntrainer = "count"\n')
    assert main(f"--config {settings} --dataset-name {corpus} --batch-size 5 --json --quiet".split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["tokens"], report["loss_first"] > 0) == (20, 320, True)
    monkeypatch.setattr(CountTrainer, "step", lambda *_: float("inf"))
    assert main(["--json", "--quiet"]) == 1 and not json.loads(capsys.readouterr().out)["finished"]
    assert main(["--list-datasets"]) == 0
    assert capsys.readouterr().out.startswith("fineweb: FineWeb: 15T tokens from CommonCrawl\n")
    assert main(["--list-datasets", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 5
    assert main(["--dataset-name", "my-dataset"]) == 1
    assert capsys.readouterr().err.startswith("error: Dataset 'my-dataset' not found")
    settings.write_text("batch = 3")
    assert main(["--config", str(settings)]) == 1
    assert "got batch." in capsys.readouterr().err
    assert main(f"--config {tmp_path}/none.toml".split()) == 1
