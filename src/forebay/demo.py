"""The whole system on one machine, with nothing faked: real files, processes, sockets, TLS and DHT.

Everything runs as the commands that a user would type, each in its own process, in a temporary directory. One worker is
killed with SIGKILL; the ledger then proves that every sample was used exactly once all the same. Each process reads a
pipe from this one and stops when it closes, so none outlives it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from forebay.base import Json
from forebay.dataset.reader import open_dataset
from forebay.errors import NetworkError
from forebay.ledger.verify import verify_ledger
from forebay.network.client import Client
from forebay.network.pki.certificates import verify_certificate
from forebay.network.pki.identity import Identity, create_network, join, verify
from forebay.observe.progress import PrepareBar, bar
from forebay.prepare.driver import prepare_dataset
from forebay.processes import deferred_signals

NAME, SEQ_LEN = "demo", 128
_log = partial(print, file=sys.stderr, flush=True)


class NodeProcess:
    """One `forebay` process; stdout and stderr go to files in a directory."""

    def __init__(self, directory: Path, label: str, *arguments: object, command: Sequence[str] = ()) -> None:
        self.label, self.is_killed = label, False
        self._stdout, self._stderr = directory / f"{label}.jsonl", directory / f"{label}.log"
        words = [*map(str, arguments), "--json", *(["--", *command] if command else [])]
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "forebay", *words],
                stdin=subprocess.PIPE, stdout=stdout, stderr=stderr,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "FOREBAY_EXIT_ON_STDIN_CLOSE": "1"},
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the others in order.
            )  # fmt: skip

    def messages(self) -> list[Json]:
        """The JSON objects that it has printed so far, each in a line; a worker's command may print other lines."""
        lines = self._stdout.read_bytes().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]

    def wait_ready(self) -> Json:
        """The first line of a server."""
        deadline = time.monotonic() + 60
        while not (messages := self.messages()):
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise self.error("is not ready")
            time.sleep(0.05)
        return messages[0]

    def error(self, text: str) -> NetworkError:
        """An error with the process's exit code and the end of its log."""
        log = self._stderr.read_text(errors="replace")[-500:]
        return NetworkError(f"demo: {self.label} {text} (exit code {self.popen.poll()}): {log.strip()}")

    def close(self) -> None:
        """Terminate the process; kill it if it does not end."""
        self.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(8)
        self.popen.kill()
        self.popen.communicate()


def run_demo(inputs: Sequence[Path] | None, keep: Path | None, command: Sequence[str], tokenizer: str) -> Json:
    """Run the demo and return its summary; `ok` says whether the ledger proves the epoch."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="forebay-demo-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(temporary)) if keep is None else keep
        directory.mkdir(parents=True, exist_ok=keep is None)
        _log("1/5  prepare: raw text to slices")
        library = Path(sysconfig.get_paths()["stdlib"])  # text that every machine has
        pattern = "[a-d]*.py" if command else "[a-su-z]*/*.py"  # less than a minute on two cores
        sources = inputs or [path for path in sorted(library.glob(pattern)) if path.stat().st_size > 200]
        files = [f for path in sources for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file()]
        # About forty slices: enough for leases to move between workers.
        slice_bytes = min(64 << 20, max(16 << 10, sum(file.stat().st_size for file in files) // 80))
        with PrepareBar() as progress:
            prepared = prepare_dataset(
                sources, directory / "dataset", tokenizer=tokenizer, name=NAME, slice_bytes=slice_bytes,
                on_progress=progress.update,
            ).to_json()  # fmt: skip
        summary = {**prepared, "bytes": open_dataset(directory / "dataset").manifest.bytes}
        summary |= _train_on_network(stack, directory, max(4 * slice_bytes, 1 << 20), command)
    return summary


def _train_on_network(stack: ExitStack, directory: Path, cache_bytes: int, command: Sequence[str]) -> Json:
    """Start all nodes, train one epoch, verify the ledger; return the fields of the summary."""

    def start(label: str, *arguments: object, command: Sequence[str] = ()) -> NodeProcess:
        with deferred_signals():  # Until the stack has the process, and ends it.
            return stack.enter_context(contextlib.closing(NodeProcess(directory, label, *arguments, command=command)))

    def start_worker(name: str) -> NodeProcess:
        return start(
            name, "worker", NAME, "--identity", directory / name, "--cache-dir", directory / f"cache-{name}",
            "--cache-bytes", cache_bytes, "--batch-size", 8, command=command,
        )  # fmt: skip

    _log("2/5  network: a root key, four members, a Kademlia DHT of four nodes")
    host, _, port = start("dht", "dht", "--nodes", 4).wait_ready()["address"].rpartition(":")
    create_network(directory / "network", NAME, bootstrap=[(host, int(port))])
    for name in ("data-node", "scheduler", "worker-1", "worker-2", "worker-3", "viewer"):
        join(directory / "network", directory / name, name)
    _log("3/5  data node: serves the slices, announces them in the DHT")
    serve = ("serve", directory / "dataset", "--identity", directory / "data-node")
    data_address = start("data node", *serve).wait_ready()["address"]
    _log("4/5  scheduler: finds the data node by name in the DHT, leases its slices")
    scheduler = start(
        "scheduler", "scheduler", NAME, "--identity", directory / "scheduler", "--state", directory / "state",
        "--seq-len", SEQ_LEN, "--lease-timeout", 4,
    ).wait_ready()  # fmt: skip
    _log(f"5/5  workers: two run {' '.join(command) or 'a program that counts'}; one is killed")
    started = time.monotonic()
    viewer = Identity.load(directory / "viewer")
    with Client(viewer) as client:
        num_samples, nodes = _train(client, scheduler["address"], start_worker)
        training_s = time.monotonic() - started
        for node in nodes:
            node.popen.wait(120)
        served, _ = client.request_json(data_address, "GET", "/v1/status")
    certify = partial(verify_certificate, root=viewer.root)
    proof = verify_ledger(Path(scheduler["ledger"]), verify=verify, certify=certify)
    workers, first, last = {}, list[float](), list[float]()
    for node in nodes:
        messages = node.messages() or [{}]  # The last one is the report; of a killed worker its last progress.
        workers[node.label] = {**messages[-1].get("report", messages[-1]), "killed": node.is_killed}
        losses = [message["loss"] for message in messages if message.get("loss") is not None]
        first, last = first + losses[:1], last + losses[-1:]
    return {
        "ok": proof.ok,
        "bytes_served": {"data node": served["bytes_sent"]},
        "training_seconds": round(training_s, 1),
        "tokens_per_s": round(num_samples * SEQ_LEN / training_s),
        "loss_from": max(first, default=None),
        "loss_to": min(last, default=None),
        "workers": workers,
        "ledger": vars(proof),
    }


def _train(client: Client, address: str, start_worker: Callable[[str], NodeProcess]) -> tuple[int, list[NodeProcess]]:
    """Watch the scheduler until the epoch is done; kill worker-1 after a third of it and start worker-3.

    Returns the number of samples used, and the workers.
    """
    nodes, used = [start_worker("worker-1"), start_worker("worker-2")], 0
    total = client.request_json(address, "GET", "/v1/status")[0]["num_samples"]
    with bar("train", total, "sample") as advance:
        while not (status := client.request_json(address, "GET", "/v1/status")[0])["done"]:
            advance(status["samples_used"] - used)
            used = status["samples_used"]
            # The scheduler receives each use at once; a worker prints its progress only twice a second.
            active = {worker["name"] for worker in status["workers"].values() if worker["samples"]}
            if len(nodes) == 2 and "worker-1" in active and used > total // 3:
                nodes[0].popen.kill()
                nodes[0].is_killed = True
                _log(f"     worker-1 killed (SIGKILL) after {used:,} samples in all; worker-3 joins")
                nodes.append(start_worker("worker-3"))
            for node in nodes[1:]:
                if node.popen.poll() not in (None, 0):
                    raise node.error("failed")
            time.sleep(0.03)
    return int(status["samples_used"]), nodes


def describe(s: Json) -> str:
    """Return a summary's lines."""
    loss = f", loss {s['loss_from']:.3f} → {s['loss_to']:.3f}" if s["loss_to"] is not None else ""
    killed = ", ".join(name for name, worker in s["workers"].items() if worker["killed"]) or "none: use more text"
    text = f"""
  prepared    {s["documents_out"]:,} documents, {s["tokens"]:,} tokens, {s["slices"]} slices, {s["bytes"] / 1e6:.1f} MB
  dataset id  {s["id"]}
  served      data node {s["bytes_served"]["data node"] / 1e6:.1f} MB
  trained     {s["tokens_per_s"]:,} tokens/s for {s["training_seconds"]} s{loss}; killed: {killed}"""
    for epoch in s["ledger"]["epochs"]:
        counts = "{samples:,} samples used, {missing} missing, {repeated} repeated".format(**epoch)
        text += f"\n  ledger      {counts}: {'proved' if s['ledger']['ok'] else 'NOT proved'}\n"
    return text
