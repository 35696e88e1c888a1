"""What a user types, what it prints, and what it says when something is wrong: one line, no traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.calibration import scaled
from support.nodes import Bootstrap


def forebay(*arguments: object, timeout: float = 90, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"d{i}", "text": f"Document {i}. " + "mill race " * 40}) + "\n" for i in range(60))
    )
    return path


@pytest.fixture(scope="module")
def dataset(corpus: Path) -> Path:
    out = corpus.parent / "dataset"
    last_json(forebay("prepare", corpus, "--out", out, "--tokenizer", "bytes", "--slice-bytes", "8KiB", "--json"))
    return out


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """A failure is told in one line that names the thing, with no traceback."""
    assert done.returncode not in (0, -9), done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("forebay: ")]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def test_prepare_prints_what_scripts_rely_on(corpus: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    summary = last_json(
        forebay(
            "prepare", corpus, "--out", tmp_path / "d", "--tokenizer", "bytes", "--slice-bytes", "8KiB",
            "--workers", 2, "--write-ids", ids, "--json",
        )
    )  # fmt: skip
    assert {"dataset", "id", "documents_in", "documents_out", "tokens", "slices", "dropped"} <= set(summary)
    assert summary["documents_in"] == summary["documents_out"] == 60
    assert ids.read_text().split() == [f"d{i}" for i in range(60)]

    shown = last_json(forebay("inspect", tmp_path / "d", "--json"))
    assert {"id", "name", "layout", "dtype", "tokens", "documents", "slices", "bytes", "tokenizer"} <= set(shown)
    assert (
        shown["id"] == summary["id"] and shown["tokens"] == summary["tokens"] and shown["slices"] == summary["slices"]
    )
    assert shown["bytes"] == sum(p.stat().st_size for p in (tmp_path / "d" / "slices").iterdir())


def test_verify_names_the_slice_with_one_flipped_byte(dataset: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    assert last_json(forebay("verify", copy, "--json"))["level"] == "hash"

    victim = sorted((copy / "slices").iterdir())[1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = forebay("verify", copy, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False and len(report["bad"]) == 1 and victim.name in report["bad"][0]


def test_help_and_version_need_no_extra_package() -> None:
    assert "prepare" in forebay("--help").stdout
    assert forebay("--version").stdout.startswith("forebay ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "no-such-dataset"], ["no-such-dataset"]),
        (["verify", "no-such-dataset"], ["no-such-dataset"]),
        (["prepare", "no-such.txt", "--out", "d", "--tokenizer", "bytes"], ["no-such.txt"]),
        (["demo", "--input", "no-such.txt"], ["no-such.txt"]),
        (["serve", "no-such-dataset", "--identity", "n"], ["no-such-dataset"]),
        (["find", "x", "--identity", "no-such-node"], ["no-such-node"]),
        (["ledger", "verify", "no-such-ledger"], ["no-such-ledger"]),
        (["worker"], ["name"]),
    ],
)
def test_a_wrong_path_is_told_in_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_line(forebay(*arguments), *words)


def test_a_missing_tokenizer_is_told_in_one_line(corpus: Path, tmp_path: Path) -> None:
    missing = tmp_path / "none" / "tokenizer.json"
    assert_one_line(forebay("prepare", corpus, "--out", tmp_path / "d", "--tokenizer", missing), "tokenizer.json")
    assert not (tmp_path / "d" / "manifest.json").exists()


def test_an_empty_input_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert_one_line(forebay("prepare", tmp_path / "empty.jsonl", "--out", tmp_path / "d", "--tokenizer", "bytes"))
    assert not (tmp_path / "d" / "manifest.json").exists()


def test_a_full_disk_is_told_in_one_line_and_the_next_run_succeeds(corpus: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        arguments = ["prepare", corpus, "--out", small / "d", "--tokenizer", "bytes", "--slice-bytes", "4KiB"]
        assert_one_line(forebay(*arguments), "disk")
        assert not (small / "d" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=4m", small], check=True)
        assert forebay(*arguments).returncode == 0
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@pytest.mark.parametrize("interrupt", ["raise KeyboardInterrupt", "Destroyed(); time.sleep(600)"])
def test_ctrl_c_while_modules_are_imported_ends_with_130(interrupt: str) -> None:
    """As from an impatient hand, or on a machine that is slow to import. Python drops an interrupt in a destructor."""
    code = (
        "import sys, time, forebay.__main__\n"
        "class Destroyed:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'forebay.cli.convert': {interrupt}\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "forebay.__main__.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "forebay: interrupted\n")


@pytest.mark.parametrize("module", ["forebay"])
def test_ctrl_c_after_the_result_is_no_failure(dataset: Path, module: str) -> None:
    for _ in range(4):
        command = [sys.executable, "-m", module, "inspect", str(dataset), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and json.loads(process.stdout.readline())["slices"] > 1
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert (process.returncode, errors) in ((0, ""), (130, "forebay: interrupted\n"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("net")
    dht = Bootstrap(1)
    assert forebay("network", "init", base / "net", "--bootstrap", "{}:{}".format(*dht.at[0])).returncode == 0
    joined = forebay("network", "join", base / "net", base / "alice", "--name", "alice", "--role", "all")
    assert joined.returncode == 0
    yield base / "alice"
    dht.close()


def test_an_unknown_name_is_told_in_one_line(node: Path, tmp_path: Path) -> None:
    timeout = ("--timeout", scaled(2))  # Within it the DHT node, which is there, has to answer.
    assert_one_line(forebay("find", "no-such-name", "--identity", node, *timeout), "no-such-name")
    state = ("--state", tmp_path / "s", *timeout)
    assert_one_line(forebay("scheduler", "no-such-name", "--identity", node, *state), "no-such-name")


def test_a_port_in_use_is_told_in_one_line(node: Path, dataset: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_one_line(forebay("serve", dataset, "--identity", node, "--listen", f"127.0.0.1:{port}"), str(port))


def test_a_role_is_given_explicitly_and_a_network_is_named_as_its_directory(node: Path, tmp_path: Path) -> None:
    net = node.parent / "net"
    assert_one_line(forebay("network", "join", net, tmp_path / "bob", "--name", "bob"), "--role")
    assert_one_line(forebay("network", "invite", net, "--issuer", "127.0.0.1:1"), "--role")
    assert not (tmp_path / "bob").exists()
    shown = last_json(forebay("network", "show", net, "--json"))
    assert shown["name"] == "net"
    done = forebay("inspect", "forebay://other/nothing", "--identity", node)
    assert_one_line(done, "expected an identity in the network 'other'", "forebay://net/nothing")


def test_join_refuses_to_overwrite_a_key(node: Path) -> None:
    key = (node / "node-key.pem").read_bytes()
    assert_one_line(
        forebay("network", "join", node.parent / "net", node, "--name", "mallory", "--role", "all"), "alice"
    )
    assert (node / "node-key.pem").read_bytes() == key
    assert (node / "node-key.pem").stat().st_mode & 0o077 == 0


def test_a_signal_that_interrupts_the_wait_for_it_ends_a_node() -> None:
    """An event's own lock is held for a moment in each wait: a handler that takes it would never return."""
    program = """
import os, signal
from forebay.cli.running import stop_event
stop = stop_event()
with stop._cond:
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.wait(30))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_a_node_is_probed_revoked_and_drains_on_sigterm(dataset: Path, tmp_path: Path) -> None:
    """Probe says 0 of a healthy node and 1 of none; a revoked peer is refused without a restart; SIGTERM exits 0."""
    for name in ("alice", "bob"):
        last = forebay("network", "join", _network(tmp_path), tmp_path / name, "--name", name, "--role", "all")
        assert last.returncode == 0, last.stderr
    peer = last_json(forebay("network", "show", tmp_path / "bob", "--json"))["peer_id"]
    dht = Bootstrap(1)
    start = f"--bootstrap={dht.at[0][0]}:{dht.at[0][1]}"
    command = [sys.executable, "-m", "forebay", "serve", dataset, "--identity", tmp_path / "alice", "--json", start]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        address = json.loads(node.stdout.readline())["address"]
        ask = ("status", address, "--identity", tmp_path / "bob", "--timeout", 20)
        assert last_json(forebay(*ask, "--json"))["healthy"]
        assert forebay("network", "revoke", peer, tmp_path / "alice").returncode == 0
        time.sleep(1.1)  # it looks once a second
        assert_one_line(forebay(*ask), address)
        node.terminate()
        assert node.wait() == 0
    dht.close()
    assert_one_line(forebay("status", address, "--identity", tmp_path / "alice", "--timeout", "1"), address)
    before = last_json(forebay("network", "show", tmp_path / "alice", "--json"))
    assert forebay("network", "renew", tmp_path / "net", tmp_path / "alice").returncode == 0
    after = last_json(forebay("network", "show", tmp_path / "alice", "--json"))
    assert after["expires"] > before["expires"] and after == before | {"expires": after["expires"]}
    assert_one_line(forebay("network", "init", tmp_path / "net"), "net")


def _network(folder: Path) -> Path:
    if not (folder / "net").exists():
        assert forebay("network", "init", folder / "net").returncode == 0
    return folder / "net"
