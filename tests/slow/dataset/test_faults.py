"""Every flush and rename of an operation fails or is the last one: a reader finds the old or the new state.

A process runs each scenario once to count its fsyncs and renames, then again and again in forks, each of which fails at
one of them: with ENOSPC (from then on, as on a full disk), with EIO (once), or by SIGKILL. The same operation again
must end in the new state, byte for byte, with no file left over. In the first run every file must be flushed before it
takes its name, and its directory afterwards.

FOREBAY_FAULTS=all tries each fault, which takes some ten minutes; otherwise some of each scenario are tried.
"""

import contextlib
import errno
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from forebay import prepare_dataset
from forebay.cli import main
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.errors import ForebayError
from forebay.fetch.downloads import download_large_file
from forebay.ledger.chain import read_entries
from forebay.ledger.writer import Ledger
from forebay.prepare import load_recipe
from support.outputs import hashes

State = dict
FAILED = 3
KINDS = ("fsync", "rename")
ALL = os.environ.get("FOREBAY_FAULTS") == "all"


class Fault(NamedTuple):
    """Operation `number` of a kind (from 1) fails with an errno, or the process is killed there (0)."""

    kind: str
    number: int
    error: int


class Disk:
    """Replaces what flushes and renames below `root` in this process: counts, checks and fails."""

    def __init__(self, root: Path, fault: Fault | None):
        self.root, self.fault = f"{root}/", fault
        self.counts = Counter()
        self.problems = []
        self._began_ns = time.time_ns() - 10**7  # within a tick of the file system's clock
        self._synced = {}
        self._unsynced_names = {}

    def install(self):
        fsync, disk = os.fsync, self

        def checked_fsync(fd):
            disk.fsync(os.fstat(fd), Path(f"/proc/self/fd/{fd}").readlink())
            fsync(fd)

        def checked(real):
            def rename(source, target, **more):
                disk.rename(Path(source), Path(target).absolute())
                real(source, target, **more)

            return rename

        os.fsync, os.rename, os.replace = checked_fsync, checked(os.rename), checked(os.replace)

    def _count(self, kind):
        self.counts[kind] += 1
        if self.fault is None or self.fault.kind != kind:
            return
        is_full = self.fault.error == errno.ENOSPC
        if self.counts[kind] == self.fault.number or (is_full and self.counts[kind] > self.fault.number):
            if not self.fault.error:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.fault.error, os.strerror(self.fault.error))

    def fsync(self, status: os.stat_result, path: Path):
        if f"{path}/".startswith(self.root):
            self._count("fsync")
            self._synced[status.st_ino] = (status.st_size, status.st_mtime_ns)
            self._unsynced_names.pop(path, None)

    def rename(self, source: Path, target: Path):
        if not str(target).startswith(self.root):
            return
        self._count("rename")
        if target.name == "progress.json":  # of a run that lasts: nobody needs it after a crash of the machine
            return
        for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
            result = path.stat()
            is_new = result.st_mtime_ns > self._began_ns
            if path.is_file() and is_new and self._synced.get(result.st_ino) != (result.st_size, result.st_mtime_ns):
                self.problems.append(f"{path.name} was not flushed before {target.name} was named")
        self._unsynced_names[target.parent] = target.name

    def unflushed(self) -> list[str]:
        """Return the problems of a run without a fault."""
        names = [name for path, name in self._unsynced_names.items() if path.is_dir()]
        return self.problems + [f"{name}: its directory was not flushed" for name in names]


class Scenario:
    """An operation on a folder: `begin` makes its input; `act` may be repeated.

    Each value that `inspect` returns is at any time as before or as after `act`.
    """

    refuses_its_output = False  # `act` fails where an earlier one made the new state

    def begin(self, folder: Path): ...
    def act(self, folder: Path): ...
    def inspect(self, folder: Path) -> State: ...


def content(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


class Prepare(Scenario):
    def __init__(self, to: str, last: str):
        self.to, self.last = to, last  # the file of the output that is named last

    def begin(self, folder: Path):
        lines = (f'{{"id": "d{i}", "text": "line {i % 7} of words\\nline {i}\\nsame"}}' for i in range(30))
        (folder / "in.jsonl").write_text("\n".join(lines))

    def act(self, folder: Path):
        dedup = {"exact": True, "minhash": True, "lines": True}
        recipe = load_recipe(settings={"name": "d", "dedup": dedup, "tokenize": {"tokenizer": "bytes"}})
        prepare_dataset(
            [folder / "in.jsonl"], folder / "out", recipe=recipe, workers=1, write_ids=folder / "ids", to=self.to,
            document_ids=self.to == "dataset",
        )  # fmt: skip

    def inspect(self, folder: Path) -> State:
        files = hashes(folder / "out") if (folder / "out" / self.last).exists() else {}
        aside = (".work/", ".inputs.json")  # The second has times and inodes of the inputs.
        out = {name: digest for name, digest in files.items() if not name.startswith(aside)}
        return {"ids": content(folder / "ids"), "out": out or None}


class Convert(Scenario):
    def __init__(self, *options: str):
        self.options, self.refuses_its_output = options, not options

    def begin(self, folder: Path):
        for name, start in (("a", 0), ("b", 7)):
            np.save(folder / f"{name}.npy", np.arange(start, start + 20_000, dtype=np.uint16))
        if self.options:
            self._convert(folder, "b")

    def act(self, folder: Path):
        self._convert(folder, "a", *self.options)

    def _convert(self, folder, name, *options):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main([*f"convert {folder}/{name}.npy {folder}/out --to forebay".split(), *options])
        if code:
            raise OSError(errors.getvalue())

    def inspect(self, folder: Path) -> State:
        replaced = [path for path in folder.glob("out.replaced-*") if not (folder / "out").exists()]
        return {"out": hashes(*replaced[:1] or [folder / "out"]) or None}


class Import(Scenario):
    """The slices of a folder become a dataset, and the dataset another file."""

    names = ("manifest.json", "slices.parquet", "chunks.sha256", "lengths.zst", "copy")

    def begin(self, folder: Path):
        for number in range(3):
            tokens = np.arange(100, dtype=np.uint16)
            write_token_slice(folder / f"{number}.safetensors", tokens, np.array([50, 100], np.uint64))

    def act(self, folder: Path):
        import_slices(folder, "name")
        download_large_file(folder, "0.safetensors", folder / "copy")

    def inspect(self, folder: Path) -> State:
        return {name: content(folder / name) for name in self.names}


class LedgerEntries(Scenario):
    """Appends until there are five entries; an acknowledged entry must be there."""

    def act(self, folder: Path):
        with Ledger.open(
            folder / "ledger.jsonl", lambda message: hashlib.sha256(message).digest(), now=lambda: 1.0
        ) as ledger:
            while ledger.next_seq < 5:
                seq = ledger.append("note" if ledger.next_seq else "job", {"n": ledger.next_seq}).seq
                Path(f"{folder}.acknowledged").write_text(str(seq))

    def inspect(self, folder: Path) -> State:
        path, acknowledged = folder / "ledger.jsonl", Path(f"{folder}.acknowledged")
        count = path.read_bytes().count(b"\n") if path.exists() else 0
        for entry, number in zip(read_entries(path) if count else (), range(count)):
            assert entry.seq == number
        assert count > int(acknowledged.read_text() if acknowledged.exists() else -1), "an acknowledged entry is lost"
        return {"entries": content(path) if count == 5 else None}


SCENARIOS = {
    "dataset": Prepare("dataset", "manifest.json"),
    "parquet": Prepare("parquet", "text.json"),
    "mds": Prepare("mds", "text.json"),
    "megatron": Prepare("megatron", "tokens.json"),
    "convert": Convert(),
    "overwrite": Convert("--overwrite"),
    "import": Import(),
    "ledger": LedgerEntries(),
}


def forked(work: Callable[[], int]) -> int:
    """Return the exit code of a function in a process of its own; negative for a signal."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = work()
        except BaseException:  # noqa: BLE001 - the child's own end
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def act(scenario: Scenario, folder: Path, fault: Fault | None, report: Path | None = None) -> int:
    """Run an operation with a fault; return 0 or FAILED."""
    disk = Disk(folder, fault)
    disk.install()
    try:
        scenario.act(folder)
    except (OSError, ForebayError):
        return FAILED
    if report is not None:
        report.write_text("\n".join([*(str(disk.counts[kind]) for kind in KINDS), *disk.unflushed()]))
    return 0


def find_problems(name: str, points: int, home: Path) -> list[str]:
    """Try at most so many faults of a scenario; return the laws that were broken."""
    scenario = SCENARIOS[name]
    origin, folder, report = home / "origin", home / "work" / "folder", home / "report"
    origin.mkdir()
    folder.parent.mkdir()
    scenario.begin(origin)

    def reset():
        shutil.rmtree(folder.parent)
        folder.parent.mkdir()
        shutil.copytree(origin, folder)

    reset()
    scenario.act(folder)  # Compiles kernels for all that follow.
    reset()
    old = scenario.inspect(folder)
    assert forked(lambda: act(scenario, folder, None, report)) == 0
    new = scenario.inspect(folder)
    assert new != old
    lines = report.read_text().splitlines()
    problems = lines[len(KINDS) :]
    faults = [
        Fault(kind, number, error)
        for kind, count in zip(KINDS, map(int, lines))
        for number in range(1, count + 1)
        for error in (errno.ENOSPC, errno.EIO, 0)
    ]
    for fault in faults if ALL else [faults[i * len(faults) // points] for i in range(points)]:
        reset()
        code = forked(lambda fault=fault: act(scenario, folder, fault))
        if code not in (0, FAILED, -signal.SIGKILL):
            problems.append(f"{fault}: ended with {code}")
        try:
            state = scenario.inspect(folder)
        except Exception as error:  # noqa: BLE001 - whatever a reader would meet
            problems.append(f"{fault}: neither old nor new: {type(error).__name__}: {error}")
            continue
        if wrong := [key for key in state if state[key] not in (old.get(key), new.get(key))]:
            problems.append(f"{fault}: neither old nor new: {wrong}")
        if code == 0 and state != new:
            problems.append(f"{fault}: reported success, but the state is not the new one")
        again = forked(lambda: act(scenario, folder, None))
        if again and not (again == FAILED and state == new and scenario.refuses_its_output):
            problems.append(f"{fault}: the next run ended with {again}")
        elif scenario.inspect(folder) != new:
            problems.append(f"{fault}: the next run made other bytes")
        remaining = [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", ".part", ".converting"))]
        if remaining and not again:  # A run that refuses begins nothing, and so cleans nothing.
            problems.append(f"{fault}: left over after the next run: {remaining[:5]}")
    return problems


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_fault_leaves_the_old_or_the_new_state(scenario):
    done = subprocess.run([sys.executable, __file__, scenario], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-5000:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(*find_problems(sys.argv[1], 6, Path(temporary)), sep="\n", end="")
