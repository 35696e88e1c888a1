"""The main job on one machine, with nothing faked: real files, processes, sockets, TLS and DHT.

Everything runs as the commands that a user would type, each in its own process, in a directory that goes away
afterwards. One worker is killed with SIGKILL on the way; the ledger then has to prove that every sample was used
exactly once all the same. Processes hold a pipe from this one, so however this one ends, they end too.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from forebay.dataset.reader import open_dataset
from forebay.errors import ForebayError, NetworkError, UsageError
from forebay.ledger.verify import verify_ledger
from forebay.network.client import Client
from forebay.network.pki.identity import Identity, create_network, join, verify
from forebay.observe.progress import PrepareBar, bar
from forebay.prepare.driver import prepare_dataset
from forebay.threads import SupervisedThread
from forebay.worker.trainer import TRAINERS, check_trainer

NAME = "demo"
SEQ_LEN = 128
# Short, so that what the killed worker held comes back while people watch.
LEASE_S = 4.0
# Text enough for a visible fall of the loss, little enough for a minute on two cores.
DEFAULT_BYTES, DEFAULT_BYTES_OF_PROGRAMS = 12_000_000, 1_800_000
READY_S = 60.0
# A demo that has not moved for this long has failed; it says so rather than wait.
STALL_S = 120.0


@dataclass
class Node:
    """One `forebay` process, and the JSON lines that it has printed so far."""

    label: str
    popen: subprocess.Popen[bytes]
    log: Path
    messages: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False

    def listen(self, stream: IO[bytes]) -> None:
        for line in stream:
            with contextlib.suppress(ValueError):
                self.messages.append(json.loads(line))

    def wait_ready(self) -> dict[str, Any]:
        """The first line of a server."""
        deadline = time.monotonic() + READY_S
        while not self.messages:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise NetworkError(f"{self.label} did not come up (exit code {self.popen.poll()}): {self.tail()}")
            time.sleep(0.05)
        return self.messages[0]

    def tail(self) -> str:
        return self.log.read_text(errors="replace").strip()[-500:] or "it said nothing"


class Cast:
    """Starts processes, and ends every one of them when it closes.

    Until then SIGTERM interrupts as Ctrl-C does. Neither does while a process starts: whoever ends it must know it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nodes: list[Node] = []
        self._starting = self._interrupted = False
        signals = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._interrupt) for number in signals}

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        if not self._starting:
            raise KeyboardInterrupt

    def start(self, label: str, *arguments: object) -> Node:
        log = self._directory / f"{label.replace(' ', '-')}.log"
        with log.open("wb") as errors:
            self._starting = True
            try:
                popen = subprocess.Popen(
                    [sys.executable, "-m", "forebay.cli", *map(str, arguments), "--json", "--exit-on-stdin-close"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=os.environ | {"PYTHONUNBUFFERED": "1"},
                    start_new_session=True,  # so that Ctrl-C reaches us alone, and we end them in order
                )
                node = Node(label, popen, log)
                self._nodes.append(node)
            finally:
                self._starting = False
        if self._interrupted:
            raise KeyboardInterrupt
        stdout = popen.stdout
        assert stdout is not None
        SupervisedThread(lambda: node.listen(stdout), f"demo {label}").start()
        return node

    def close(self) -> None:
        for node in reversed(self._nodes):
            if node.popen.poll() is None:
                node.popen.terminate()
        deadline = time.monotonic() + 8
        for node in reversed(self._nodes):
            try:
                node.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.popen.kill()
                node.popen.wait()
            for stream in (node.popen.stdin, node.popen.stdout):
                if stream is not None:
                    stream.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def run_demo(
    inputs: Sequence[Path] | None = None,
    json_file: Path | None = None,
    keep: Path | None = None,
    trainer: str = "count",
    max_bytes: int | None = None,
    tokenizer: str = "train:4096",
) -> int:
    """Runs it, prints the summary, and returns the exit code: 0 only if the ledger proves the epoch."""
    for path in inputs or ():
        if not path.exists():
            raise UsageError(f"no input at {path}: expected a file or a directory of text. Check the path")
    check_trainer(trainer)
    started = time.monotonic()
    with ExitStack() as stack:
        directory = stack.enter_context(_workplace(keep))
        cast = Cast(directory)
        stack.callback(cast.close)
        _say("1/5  prepare: raw text to slices")
        default_bytes = DEFAULT_BYTES if trainer in TRAINERS else DEFAULT_BYTES_OF_PROGRAMS
        sources = inputs or _python_text(max_bytes or default_bytes)
        prepared = _prepare(sources, directory / "dataset", tokenizer)
        summary = {**prepared, "trainer": trainer, **_play(cast, directory, prepared["slice_bytes"], trainer)}
    summary["seconds"] = round(time.monotonic() - started, 1)
    _print_summary(summary)
    if json_file:
        json_file.write_text(json.dumps(summary, indent=1) + "\n")
    if not summary["ok"]:
        raise ForebayError("demo: the ledger does not prove the epoch; run it again with --keep DIR and read the logs")
    print("demo: ok")
    return 0


def _play(cast: Cast, directory: Path, slice_bytes: int, trainer: str) -> dict[str, Any]:
    """Everything but the preparation; the facts of it."""
    _say("2/5  network: a root key, four members, a Kademlia DHT of eight nodes")
    host, _, port = cast.start("dht", "dht", "--nodes", "4").wait_ready()["address"].rpartition(":")
    network = directory / "network"
    create_network(network, "demo", bootstrap=[(host, int(port))])
    for name in ("data-node", "scheduler", "worker-1", "worker-2", "worker-3", "viewer"):
        join(network, directory / name, name)

    _say("3/5  data node: serves the slices, announces them in the DHT")
    data_node = cast.start("data node", "serve", directory / "dataset", "--network", directory / "data-node")
    data_address = data_node.wait_ready()["address"]

    _say("4/5  scheduler: finds the data node there by name, leases its slices")
    scheduler = cast.start(
        "scheduler", "schedule", NAME, "--network", directory / "scheduler", "--state", directory / "state",
        "--seq-len", SEQ_LEN, "--lease", LEASE_S,
    ).wait_ready()  # fmt: skip

    _say(f"5/5  workers: two train ({trainer}); one is killed on the way")

    def worker(name: str) -> Node:
        return cast.start(
            name, "work", NAME, "--network", directory / name, "--cache-dir", directory / f"cache-{name}",
            "--cache-bytes", max(4 * slice_bytes, 1 << 20), "--batch-size", 8, "--trainer", trainer,
        )  # fmt: skip

    began = time.monotonic()
    with Client(Identity.load(directory / "viewer")) as client:
        status, workers = _train(client, scheduler["address"], worker)
        training_s = time.monotonic() - began
        for node in workers:
            node.popen.wait(30)
        served, _ = client.request_json(data_address, "GET", "/v1/status")
    proof = verify_ledger(Path(scheduler["ledger"]), verify=verify)
    rows = {node.label: _worker_facts(node) for node in workers}
    losses = [(row["loss_first"], row["loss_last"]) for row in rows.values() if row["loss_first"] is not None]
    shares = [row["wait_share"] for row in rows.values() if row.get("wait_share") is not None]
    return {
        "ok": proof.ok and status["done"],
        "bytes_served": {"data node": served["bytes_sent"]},
        "training_seconds": round(training_s, 1),
        "tokens_per_s": round(status["samples_used"] * SEQ_LEN / training_s),
        "wait_share": round(sum(shares) / len(shares), 4) if shares else None,
        "loss_from": max(first for first, _ in losses) if losses else None,
        "loss_to": min(last for _, last in losses) if losses else None,
        "workers": rows,
        "ledger": proof.to_json(),
    }


def _worker_facts(node: Node) -> dict[str, Any]:
    """A worker's report; of a killed one, its last progress, which tells how far its loss had come."""
    last = node.messages[-1] if node.messages else {}
    losses = [message["loss"] for message in node.messages if message.get("loss") is not None] or [None]
    report = last.get("report", last)
    return {"loss_first": losses[0], "loss_last": losses[-1], **report, "killed": node.killed}


def _train(client: Client, address: str, start: Callable[[str], Node]) -> tuple[dict[str, Any], list[Node]]:
    """Watches the scheduler until the epoch is done; kills worker-1 at a third and brings worker-3."""
    workers = [start("worker-1"), start("worker-2")]
    used, moved_at = 0, time.monotonic()
    total = client.request_json(address, "GET", "/v1/status")[0]["num_samples"]
    with bar("train", total, "sample") as advance:
        while True:
            status, _ = client.request_json(address, "GET", "/v1/status")
            if status["samples_used"] > used:
                advance(status["samples_used"] - used)
                used, moved_at = status["samples_used"], time.monotonic()
            if status["done"]:
                return dict(status), workers
            if time.monotonic() - moved_at > STALL_S:
                raise NetworkError(
                    f"no sample was used for {STALL_S:.0f} s; run again with --keep DIR and read the logs"
                )
            # Asked of the scheduler, which hears of each slice; a worker reports twice a second only.
            began = {w["name"] for w in status["workers"].values() if w["samples"]}
            if len(workers) == 2 and "worker-1" in began and used > total // 3:
                os.kill(workers[0].popen.pid, signal.SIGKILL)
                workers[0].killed = True
                _say(f"     worker-1 killed (SIGKILL) after {used:,} samples in all; worker-3 joins")
                workers.append(start("worker-3"))
            for node in workers[1:]:
                if node.popen.poll() not in (None, 0):
                    raise NetworkError(f"{node.label} failed: {node.tail()}")
            time.sleep(0.03)


def _print_summary(s: dict[str, Any]) -> None:
    epoch = s["ledger"]["epochs"][0] if s["ledger"]["epochs"] else {"samples": 0, "missing": "?", "repeated": "?"}
    waited = "unknown" if s["wait_share"] is None else f"{s['wait_share']:.1%}"
    print(f"""
  prepared    {s["documents"]:,} documents, {s["tokens"]:,} tokens, {s["slices"]} slices, {s["bytes"] / 1e6:.1f} MB
  dataset id  {s["dataset_id"]}
  served      data node {s["bytes_served"]["data node"] / 1e6:.1f} MB
  trained     {s["tokens_per_s"]:,} tokens/s for {s["training_seconds"]} s; waited for data: {waited} of it""")
    if s["loss_from"] is not None:
        print(f"  loss        {s['loss_from']:.3f} → {s['loss_to']:.3f}  ({s['trainer']})")
    if not any(worker["killed"] for worker in s["workers"].values()):
        print("  note        the text was used up before a worker could be killed; more text shows more")
    counts = f"{epoch['samples']:,} samples used, {epoch['missing']} missing, {epoch['repeated']} repeated"
    print(f"  ledger      {counts}: {'proved' if s['ledger']['ok'] else 'NOT proved'}\n")


def _prepare(sources: Sequence[Path], out: Path, tokenizer: str) -> dict[str, Any]:
    size = sum(f.stat().st_size for s in sources for f in ([s] if s.is_file() else s.rglob("*")) if f.is_file())
    # Forty slices or so, whatever the input: enough for leases to move between workers.
    slice_bytes = min(64 << 20, max(16 << 10, size // 80))
    with PrepareBar() as shown:
        made = prepare_dataset(
            sources, out, tokenizer=tokenizer, name=NAME, slice_bytes=slice_bytes, on_progress=shown.update
        )
    facts = made.to_json()
    return {
        "documents": facts["documents_out"],
        "dataset_id": facts["id"],
        "tokens": facts["tokens"],
        "slices": facts["slices"],
        "bytes": open_dataset(out).manifest.bytes,
        "slice_bytes": slice_bytes,
    }


def _python_text(max_bytes: int) -> list[Path]:
    """Up to `max_bytes` of the installed Python's own source: text that every machine has."""
    found = []
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")) + sorted(library.rglob("*.txt")):
        parts = path.relative_to(library).parts
        if parts[0] in {"site-packages", "dist-packages", "test"} or "tests" in parts or not path.is_file():
            continue
        if 200 <= (size := path.stat().st_size) <= max_bytes:
            max_bytes -= size
            found.append(path)
    return found


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="forebay-demo-", ignore_cleanup_errors=True) as directory:
            yield Path(directory)
        return
    try:
        keep.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{keep} exists: --keep wants a directory of its own. Choose another") from None
    yield keep


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
