"""The hub from processes of their own: a dataset larger than memory and disk, a killed download, no network at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.calibration import scaled
from support.hub_repos import write_repo
from support.hub_server import HubServer
from support.waiting import until

STREAM = """
import json, re, sys, time
from pathlib import Path
from forebay import TextStream
from forebay.stream import StreamOptions
began = time.process_time()
options = StreamOptions(shuffle_documents=100)
stream = TextStream("hf:a/large", tokenizer="bytes", seq_len=1024, batch_size=8, options=options)
batch = next(iter(stream))
first_s = time.process_time() - began  # A processor's seconds: the clock tells how busy the machine is.
# Not ru_maxrss, which begins with that of the process that forked this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
print(json.dumps({"first_s": first_s, "peak": peak, "shape": batch.inputs.shape}))
"""
DOWNLOAD = "from forebay.storage.hub_copies import download_hub; print(download_hub('hf:a/b').paths[0])"


@pytest.fixture
def hub(tmp_path) -> Iterator[HubServer]:
    write_repo(tmp_path / "hub/datasets/a/b")
    with HubServer(tmp_path / "hub") as server:
        yield server


def started(script: str, tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    reported = {
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | reported,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_five_gigabytes_begin_at_once(hub: HubServer, tmp_path):
    repo = write_repo(hub.directory / "datasets/a/large")
    row = json.dumps({"text": "To be, or not to be, that is the question. " * 60}) + "\n"
    with (repo / "train.jsonl").open("wb") as file:
        file.write((row * 4000).encode())
        file.truncate(5_000_000_000)  # the rest is a hole, and never read
    process = started(STREAM, tmp_path, HF_ENDPOINT=hub.url)
    out, err = process.communicate()
    assert process.returncode == 0, err
    reported = json.loads(out)
    assert reported["shape"] == [8, 1024]
    assert reported["first_s"] < scaled(1.0) and reported["peak"] < 400 << 20
    assert hub.bytes_sent["train.jsonl"] < 8 << 20 and not (tmp_path / "cache").exists()


def test_a_killed_download_is_continued(hub: HubServer, tmp_path):
    data = hub.directory / "datasets/a/b/train.jsonl"
    data.write_bytes(b'{"text": "a line of text"}\n' * 200_000)
    hub.faults.connection_bytes_per_s = 2e6
    process = started(DOWNLOAD, tmp_path, HF_ENDPOINT=hub.url)
    cache = tmp_path / "cache"
    # Here, not only sent: a busy process leaves what was sent in its socket, and a kill loses that.
    until(lambda: any(path.stat().st_size >= 1 << 20 for path in cache.rglob("*.incomplete")))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = hub.bytes_sent["train.jsonl"]
    assert 1 << 20 <= before < data.stat().st_size
    assert not list(cache.rglob("*.jsonl"))
    hub.reset()
    hub.faults.connection_bytes_per_s = 0
    process = started(DOWNLOAD, tmp_path, HF_ENDPOINT=hub.url)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert Path(out.strip()).read_bytes() == data.read_bytes()
    assert hub.bytes_sent["train.jsonl"] < data.stat().st_size - (256 << 10)


def test_without_a_network():
    """The hub itself, from a namespace that has no way to it."""
    cut_off = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*cut_off, "true"], capture_output=True).returncode:
        pytest.skip("no right to make a network namespace")
    script = (
        "import forebay; forebay.TextStream('hf:HuggingFaceFW/fineweb', tokenizer='bytes', seq_len=8, batch_size=1)"
    )
    reported = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run([*cut_off, sys.executable, "-c", script], env=reported, capture_output=True, text=True)
    message = done.stderr.splitlines()[-1]
    assert message.startswith("forebay.errors.DownloadError: Failed to download dataset 'HuggingFaceFW/fineweb'")
    assert "https://huggingface.co" in message and "tiny_shakespeare" in message
