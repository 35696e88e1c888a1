"""Examples of datasets by name, each whole in itself; they run against a small hub on this machine."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import DownloadError, PrepareError
from forebay.prepare.tokenize.tokenizers import byte_tokenizer
from forebay.worker import create_huggingface_dataset
from support.hub_repos import write_repo
from support.hub_server import HubServer, make_hub
from support.store import stored


def make_repositories(folder: Path):
    """A vocabulary of bytes has the name gpt2: GPT-2's own takes half a second to load, and 100 times the steps."""
    hub = make_hub(folder)
    (hub / "models/gpt2/tokenizer.json").write_text(byte_tokenizer().to_str())
    (write_repo(hub / "datasets/example/scripted") / "scripted.py").write_text("import datasets\n")
    copied = write_repo(hub / "datasets/example/copied") / "default/train/0000.parquet"
    copied.parent.mkdir(parents=True)
    shutil.copy(next((hub / "datasets/winglian").rglob("*train*.parquet")), copied)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[HubServer]:
    """A hub of our own, and nothing kept from before."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer(stored(make_repositories)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_few_batches(hub):
    dataset = create_huggingface_dataset(
        dataset_name="tiny_shakespeare", rank=0, world_size=1, num_batches=5, batch_size=4, seq_len=128
    )
    assert len(dataset) == 5
    assert [(tuple(inputs.shape), tuple(labels.shape)) for inputs, labels in dataset] == [((4, 128), (4, 128))] * 5
    for name, seq_len in (("fineweb", 1024), ("fineweb-edu", 1024), ("pile", 2048), ("shakespeare", 512)):
        dataset = create_huggingface_dataset(name, num_batches=1, batch_size=1, streaming=True)
        inputs, labels = next(iter(dataset))
        assert inputs.shape == (1, seq_len) and (inputs[:, 1:] == labels[:, :-1]).all()


def test_ten_steps_without_a_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    command = ["--dataset-name", "tiny_shakespeare", "--num-steps", "10", "--trainer", "count", "--json"]
    done = subprocess.run([sys.executable, "-m", "forebay.worker", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "80 sonnets that come with the package" in done.stderr
    report = json.loads(done.stdout)
    assert report["finished"] and report["steps"] == 10 and report["loss_last"] < report["loss_first"]
    with pytest.raises(DownloadError):
        create_huggingface_dataset("shakespeare")


def test_a_loading_script_is_not_run_and_its_copy_is_named(hub):
    with pytest.raises(PrepareError, match=r"got a loading script .scripted[.]py.") as reported:
        create_huggingface_dataset("example/scripted", tokenizer_name="bytes")
    assert "example/scripted@refs%2Fconvert%2Fparquet" in str(reported.value)
    hub.revisions.add("refs/convert/parquet")  # a revision with files alone
    name = "example/copied@refs%2Fconvert%2Fparquet"
    assert len(list(create_huggingface_dataset(name, num_batches=2, tokenizer_name="bytes"))) == 2
