"""Commands as a user types them: what they print, and one line that names the fault when something is wrong."""

import json
import os
import signal
from pathlib import Path

import pytest

from forebay.cli import main
from forebay.network.pki.identity import create_network, join
from support.preparing import write_jsonl
from support.store import stored

Printed = pytest.CaptureFixture[str]


def write_corpus(folder: Path):
    rows = [{"id": f"d{i}", "text": f"Document {i}. " + "mill race " * 40} for i in range(60)]
    write_jsonl(folder / "texts.jsonl", rows)


@pytest.fixture
def corpus() -> Path:
    return stored(write_corpus) / "texts.jsonl"


@pytest.fixture
def node(tmp_path) -> Path:
    create_network(tmp_path / "net", "net")
    join(tmp_path / "net", tmp_path / "alice", "alice")
    return tmp_path / "alice"


def forebay(*arguments: object) -> int:
    """Return the exit status of a command."""
    try:
        return main([str(word) for word in arguments])
    except SystemExit as error:
        return int(error.code or 0)


def report(capsys: Printed, *arguments: object, code: int = 0) -> dict:
    """Return the JSON that a command prints."""
    capsys.readouterr()
    assert forebay(*arguments, "--json") == code
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def assert_one_line(capsys: Printed, arguments: list[object], *words: str):
    """The command fails with one line of error that has these words."""
    assert forebay(*arguments) != 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("forebay: ")]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_prepare_inspect_and_verify_print_what_scripts_rely_on(corpus, tmp_path, capsys):
    out, ids = tmp_path / "d", tmp_path / "ids"
    prepare = ("prepare", corpus, "--out", out, "--tokenizer", "bytes", "--slice-bytes", "8KiB", "--workers", 1)
    summary = report(capsys, *prepare, "--write-ids", ids)
    assert {"dataset", "id", "documents_in", "documents_out", "tokens", "slices", "dropped"} <= set(summary)
    assert summary["documents_in"] == summary["documents_out"] == 60
    assert ids.read_text().split() == [f"d{i}" for i in range(60)]
    shown = report(capsys, "inspect", out)
    assert {"id", "name", "layout", "dtype", "tokens", "documents", "slices", "bytes", "tokenizer"} <= set(shown)
    assert {key: shown[key] for key in ("id", "tokens", "slices")} == {
        key: summary[key] for key in ("id", "tokens", "slices")
    }
    slices = sorted((out / "slices").iterdir())
    assert shown["bytes"] == sum(path.stat().st_size for path in slices)
    assert report(capsys, "verify", out)["level"] == "hash"
    data = bytearray(slices[1].read_bytes())
    data[len(data) // 2] ^= 1
    slices[1].write_bytes(data)
    verified = report(capsys, "verify", out, code=1)
    assert verified["ok"] is False and len(verified["bad"]) == 1 and slices[1].name in verified["bad"][0]


def test_roles_names_and_keys_of_a_network(node, tmp_path, capsys):
    """A role is given explicitly, a network has the name of its directory, and no key is overwritten."""
    net, key = tmp_path / "net", (node / "node-key.pem").read_bytes()
    assert_one_line(capsys, ["network", "join", net, tmp_path / "bob", "--name", "bob"], "--role")
    assert_one_line(capsys, ["network", "invite", net, "--issuer", "127.0.0.1:1"], "--role")
    assert not (tmp_path / "bob").exists()
    assert report(capsys, "network", "show", net)["name"] == "net"
    other = ["inspect", "forebay://other/nothing", "--identity", node]
    assert_one_line(capsys, other, "expected an identity in the network 'other'", "forebay://net/nothing")
    assert_one_line(capsys, ["network", "join", net, node, "--name", "mallory", "--role", "all"], "alice")
    assert (node / "node-key.pem").read_bytes() == key
    assert (node / "node-key.pem").stat().st_mode & 0o077 == 0
    before = report(capsys, "network", "show", node)
    assert forebay("network", "renew", net, node) == 0
    assert "alice has a new certificate until" in capsys.readouterr().out
    after = report(capsys, "network", "show", node)
    assert after["expires"] >= before["expires"] and after == before | {"expires": after["expires"]}


OTHERS = [
    "AWS_REGION=eu",
    "HF_DATASETS_NAME=my run 3",
    'JSON={"a": 1}',
    "MOTD=it's fine",
    "export PATH",
    "# a comment",
    "",
]
OWN = ["R2_DATASET_BUCKET_NAME=b", "export DATASET_BINS_PATH='remote/'", "R2_DATASET_READ_ACCESS_KEY_ID = id-1"]


@pytest.mark.parametrize("how", ["before", "behind", "environment"])
@pytest.mark.parametrize(
    "lines, environment, message",
    [
        ([], {}, "R2_DATASET_ACCOUNT_ID, got none"),
        (["R2_DATASET_ACCOUNT_ID="], {}, "R2_DATASET_ACCOUNT_ID, it is empty"),
        (["R2_DATASET_ACCOUNT_ID="], {"R2_DATASET_ACCOUNT_ID": "a"}, "R2_DATASET_READ_SECRET_ACCESS_KEY, got none"),
        (["R2_DATASET_ACCOUNT_ID=a"], {"R2_DATASET_ACCOUNT_ID": ""}, "R2_DATASET_READ_SECRET_ACCESS_KEY, got none"),
        (["R2_DATASET_ACOUNT_ID=a"], {}, "got R2_DATASET_ACOUNT_ID"),
    ],
)
def test_an_env_file_has_lines_of_others_and_its_empty_keys_are_told(
    capsys, monkeypatch, tmp_path, how, lines, environment, message
):
    for name in [name for name in os.environ if name.startswith(("R2_DATASET", "DATASET_BINS"))]:
        monkeypatch.delenv(name)
    for line in (*OWN, *lines):  # Restored afterwards.
        monkeypatch.setenv(line.partition("=")[0].removeprefix("export ").strip(), "")
    monkeypatch.delenv("R2_DATASET_ACCOUNT_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "run.env"
    path.write_text("\n".join([*OTHERS, *OWN, *lines]))
    command, options = ["inspect", "r2://"], ["--env-file", path]
    if how == "environment":
        monkeypatch.setenv("FOREBAY_ENV_FILE", str(path))
        options = []
    assert forebay(*(options + command if how == "before" else command + options)) == 2
    printed = capsys.readouterr().err
    assert message in printed and "id-1" not in printed and "run.env:1: AWS_REGION is not read. Set it" in printed


def test_a_preparation_that_is_terminated_says_that_it_continues(monkeypatch, tmp_path, corpus):
    monkeypatch.setattr("forebay.prepare.driver.prepare_dataset", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):  # of which `__main__` tells
        forebay("prepare", corpus, "--out", tmp_path / "d", "--tokenizer", "bytes")
    signal.signal(signal.SIGTERM, before)
