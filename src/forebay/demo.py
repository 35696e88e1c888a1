"""The main job on one machine, with nothing faked: real files, processes, sockets, TLS and DHT.

Everything runs as the commands that a user would type, each in its own process, in a directory that goes away
afterwards. One worker is killed with SIGKILL on the way; the ledger then has to prove that every sample was used
exactly once all the same. Processes hold a pipe from this one, so however this one ends, they end too.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from forebay.errors import ForebayError, NetworkError, UsageError
from forebay.threads import Supervised
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
    """One `forebay` process, and what it has said so far."""

    label: str
    popen: subprocess.Popen[bytes]
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    killed: bool = False
    is_ready: threading.Event = field(default_factory=threading.Event)

    def listen(self, stream: IO[bytes]) -> None:
        for line in stream:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if message.get("ready"):
                self.ready = message
                self.is_ready.set()
            elif "report" in message:
                self.report = message["report"]
            else:
                self.first = self.first or message
                self.last = message

    def wait_ready(self) -> dict[str, Any]:
        deadline = time.monotonic() + READY_S
        while not self.is_ready.wait(0.05):
            if self.popen.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace").strip().splitlines()[-3:]
                said = " / ".join(tail) or "it said nothing"
                raise NetworkError(f"{self.label} did not come up (exit code {self.popen.poll()}): {said}")
        return self.ready


class Cast:
    """Starts processes, and ends every one of them when it closes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nodes: list[Node] = []

    def start(self, label: str, *arguments: str) -> Node:
        log = self._directory / f"{label.replace(' ', '-')}.log"
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with log.open("wb") as errors, _interrupts_wait():
            popen = subprocess.Popen(
                [sys.executable, "-m", "forebay.cli", *arguments, "--json", "--lifeline"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # so that Ctrl-C reaches us alone, and we end them in order
            )
            node = Node(label, popen, log)
            self._nodes.append(node)
        assert popen.stdout is not None
        stdout = popen.stdout
        Supervised(lambda: node.listen(stdout), f"demo {label}").start()
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


def run_demo(
    *,
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
        stack.enter_context(_sigterm_interrupts())
        directory = stack.enter_context(_workplace(keep))
        cast = Cast(directory)
        stack.callback(cast.close)
        summary = _play(cast, directory, inputs, trainer, max_bytes, tokenizer)
    summary["seconds"] = round(time.monotonic() - started, 1)
    _print_summary(summary)
    if json_file:
        json_file.write_text(json.dumps(summary, indent=1) + "\n")
    if not summary["ok"]:
        raise ForebayError("demo: the ledger does not prove the epoch; run it again with --keep DIR and read the logs")
    print("demo: ok")
    return 0


def _play(
    cast: Cast,
    directory: Path,
    inputs: Sequence[Path] | None,
    trainer: str,
    max_bytes: int | None,
    tokenizer: str,
) -> dict[str, Any]:
    _say("1/5  prepare: raw text to slices")
    default_bytes = DEFAULT_BYTES if trainer in TRAINERS else DEFAULT_BYTES_OF_PROGRAMS
    sources = list(inputs or [_python_text(directory / "text", max_bytes or default_bytes)])
    prepared = _prepare(sources, directory / "dataset", tokenizer)

    _say("2/5  network: a root key, four members, a Kademlia DHT of eight nodes")
    dht = cast.start("dht", "dht", "--nodes", "4")
    bootstrap = dht.wait_ready()["address"]
    homes = _make_network(
        directory, bootstrap, ["data-node", "scheduler", "worker-1", "worker-2", "worker-3", "viewer"]
    )

    _say("3/5  data node: serves the slices, announces them in the DHT")
    data_node = cast.start("data node", "serve", str(directory / "dataset"), "--network", homes["data-node"])
    data_address = data_node.wait_ready()["address"]

    _say("4/5  scheduler: finds the data node there by name, leases its slices")
    state = str(directory / "state")
    scheduler = cast.start(
        "scheduler", "schedule", NAME, "--network", homes["scheduler"], "--state", state,
        "--seq-len", str(SEQ_LEN), "--lease", str(LEASE_S),
    )  # fmt: skip
    scheduler_facts = scheduler.wait_ready()

    _say(f"5/5  workers: two train ({trainer}); one is killed on the way")

    def worker(name: str) -> Node:
        return cast.start(
            name, "work", NAME, "--network", homes[name], "--cache-dir", str(directory / f"cache-{name}"),
            "--cache-bytes", str(max(4 * prepared["slice_bytes"], 1 << 20)), "--batch-size", "8", "--trainer", trainer,
        )  # fmt: skip

    workers = [worker("worker-1"), worker("worker-2")]
    began = time.monotonic()
    status = _train(scheduler_facts["address"], homes["viewer"], workers, worker)
    training_s = time.monotonic() - began
    for node in workers:
        node.popen.wait(30)
    from forebay.network.client import Client
    from forebay.network.identity import Identity

    served, _ = Client(Identity.load(homes["viewer"])).request_json(data_address, "GET", "/v1/status")
    return _summary(prepared, status, served, workers, Path(scheduler_facts["ledger"]), training_s, trainer)


def _train(address: str, viewer: str, workers: list[Node], start: Any) -> dict[str, Any]:
    """Watches the scheduler until the epoch is done; kills worker-1 at a third and brings worker-3."""
    from forebay.network.client import Client
    from forebay.network.identity import Identity

    client = Client(Identity.load(viewer))
    used, moved_at = -1, time.monotonic()
    with tqdm(desc="train     ", unit="sample", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        while True:
            status, _ = client.request_json(address, "GET", "/v1/status")
            bar.total = status["num_samples"]
            bar.update(status["samples_used"] - bar.n)
            losses = [f"{w.last['loss']:.2f}" for w in workers if w.last.get("loss") is not None]
            bar.set_postfix_str("loss " + " ".join(losses) if losses else "")
            if status["done"]:
                return dict(status)
            if status["samples_used"] != used:
                used, moved_at = status["samples_used"], time.monotonic()
            if time.monotonic() - moved_at > STALL_S:
                raise NetworkError(
                    f"no sample was used for {STALL_S:.0f} s; run again with --keep DIR and read the logs"
                )
            # Asked of the scheduler, which hears of each slice; a worker reports twice a second only.
            began = {w["name"] for w in status["workers"].values() if w["samples"]}
            if len(workers) == 2 and "worker-1" in began and used > status["num_samples"] // 3:
                os.kill(workers[0].popen.pid, signal.SIGKILL)
                workers[0].killed = True
                tqdm.write(
                    f"     worker-1 killed (SIGKILL) after {used:,} samples in all; worker-3 joins",
                    file=sys.stderr,
                )
                workers.append(start("worker-3"))
            for node in workers[1:]:
                if node.popen.poll() not in (None, 0):
                    raise NetworkError(f"{node.label} failed: {node.log.read_text(errors='replace').strip()[-500:]}")
            time.sleep(0.03)


def _summary(
    prepared: dict[str, Any], status: dict[str, Any], served: dict[str, Any], workers: list[Node], ledger: Path,
    training_s: float, trainer: str,
) -> dict[str, Any]:  # fmt: skip
    from forebay.ledger.verify import verify_ledger
    from forebay.network.identity import verify

    proof = verify_ledger(ledger, verify=verify)
    rows = {w.label: (w.report or w.last) | {"killed": w.killed} for w in workers}
    # A killed worker left no report; its progress tells how far its loss had come.
    losses = [
        (float(w.report.get("loss_first") or w.first["loss"]), float(w.report.get("loss_last") or w.last["loss"]))
        for w in workers
        if w.first.get("loss") is not None
    ]
    shares = [r["wait_share"] for r in rows.values() if r.get("wait_share") is not None]
    return {
        "ok": proof.ok and status["done"],
        "documents": prepared["documents_out"],
        "tokens": prepared["tokens"],
        "slices": prepared["slices"],
        "bytes": prepared["bytes"],
        "dataset_id": prepared["id"],
        "trainer": trainer,
        "bytes_served": {"data node": served["bytes_sent"]},
        "training_seconds": round(training_s, 1),
        "tokens_per_s": round(status["samples_used"] * SEQ_LEN / training_s),
        "wait_share": round(sum(shares) / len(shares), 4) if shares else None,
        "loss_from": max(start for start, _ in losses) if losses else None,
        "loss_to": min(to for _, to in losses) if losses else None,
        "workers": rows,
        "ledger": proof.to_json(),
    }


def _print_summary(s: dict[str, Any]) -> None:
    epoch = s["ledger"]["epochs"][0] if s["ledger"]["epochs"] else {"samples": 0, "missing": "?", "repeated": "?"}
    facts = s | {"mb": s["bytes"] / 1e6}
    lines = [
        ("prepared", "{documents:,} documents, {tokens:,} tokens, {slices} slices, {mb:.1f} MB".format(**facts)),
        ("dataset id", s["dataset_id"]),
        ("served", ", ".join(f"{who} {n / 1e6:.1f} MB" for who, n in s["bytes_served"].items())),
        ("trained", f"{s['tokens_per_s']:,} tokens/s for {s['training_seconds']} s, "
         + (f"{s['wait_share']:.1%} of it waiting for data" if s["wait_share"] is not None else "wait unknown")),
    ]  # fmt: skip
    if s["loss_from"] is not None:
        lines.append(("loss", f"{s['loss_from']:.3f} → {s['loss_to']:.3f}  ({s['trainer']})"))
    if not any(w["killed"] for w in s["workers"].values()):
        lines.append(("note", "the text was used up before a worker could be killed; more text shows more"))
    lines.append(
        ("ledger", f"{epoch['samples']:,} samples used, {epoch['missing']} missing, {epoch['repeated']} repeated: "
         + ("proved" if s["ledger"]["ok"] else "NOT proved"))
    )  # fmt: skip
    print()
    for key, text in lines:
        print(f"  {key:<11} {text}")
    print()


def _prepare(sources: Sequence[Path], out: Path, tokenizer: str) -> dict[str, Any]:
    from forebay.dataset.reader import open_dataset
    from forebay.observe.progress import PrepareBar
    from forebay.prepare import prepare

    size = sum(f.stat().st_size for s in sources for f in ([s] if s.is_file() else s.rglob("*")) if f.is_file())
    # Forty slices or so, whatever the input: enough for leases to move between workers.
    slice_bytes = min(64 << 20, max(16 << 10, size // 80))
    with PrepareBar() as bar:
        summary = prepare(sources, out, tokenizer=tokenizer, name=NAME, slice_bytes=slice_bytes, on_progress=bar.update)
    return dict(summary.to_json()) | {"slice_bytes": slice_bytes, "bytes": open_dataset(out).manifest.bytes}


def _python_text(directory: Path, max_bytes: int) -> Path:
    """A copy of up to `max_bytes` of the installed Python's own source: text that every machine has."""
    directory.mkdir()
    taken = 0
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")) + sorted(library.rglob("*.txt")):
        parts = path.relative_to(library).parts
        if parts[0] in {"site-packages", "dist-packages", "test"} or "tests" in parts or not path.is_file():
            continue
        size = path.stat().st_size
        if taken + size > max_bytes or size < 200:
            continue
        taken += size
        shutil.copyfile(path, directory / "__".join(parts))
    return directory


def _make_network(directory: Path, bootstrap: str, names: Sequence[str]) -> dict[str, str]:
    from forebay.network.identity import create_network, join

    host, _, port = bootstrap.rpartition(":")
    create_network(directory / "network", "demo", bootstrap=[(host, int(port))])
    for name in names:
        join(directory / "network", directory / name, name)
    return {name: str(directory / name) for name in names}


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(f"{keep} exists: --keep wants a directory of its own. Choose another") from None
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="forebay-demo-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """`kill` ends the demo as Ctrl-C does: with its processes and files gone."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM count at the end: a process that was started is known to whoever ends it."""
    came: list[int] = []
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    caught = {n: handler for n, handler in handlers.items() if callable(handler)}
    for number in caught:
        signal.signal(number, lambda n, _: came.append(n))
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
