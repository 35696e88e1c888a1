"""Faults of the disk, one at a time, at every write, flush and rename of an operation.

`python tests/support/faults.py [--points N] [SCENARIO ...]` runs each scenario once to count its writes, fsyncs and
renames, then again and again in forked processes, of which each fails at one of them: with ENOSPC (from then on, as
on a full disk), with EIO (once), or by SIGKILL; a write that fails has written half. After each fault what a reader
sees must be the old or the new state, and the same operation again must end in the new state, byte for byte, with no
file left over. In the first run every file must be flushed before it takes its name, and its directory afterwards.

What is written by C code of other libraries (SQLite, memory maps) is not seen here.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import hashlib
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support.outputs import hashes

State = dict[str, Any]
FAILED, BUG = 3, 4
LEFT_OVER = (".tmp", ".part", ".converting")
SHOWN = ("write", "fsync", "rename")


class Fault(NamedTuple):
    """The n-th operation of a kind (from 1) fails with an errno, or the process is killed there (0)."""

    kind: str
    number: int
    error: int


class Disk:
    """Replaces what writes, flushes and renames below `root` in this process: counts, checks and fails."""

    def __init__(self, root: Path, fault: Fault | None) -> None:
        self.root = f"{root}/"
        self.fault = fault
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._began_ns = time.time_ns() - 10**7  # Within a tick of the file system's clock.
        self._synced: dict[int, tuple[int, int]] = {}
        self._unsynced_names: dict[Path, str] = {}

    def install(self) -> None:
        real_open, write, pwrite, sendfile, fsync = io.open, os.write, os.pwrite, os.sendfile, os.fsync
        disk = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                if disk.covers(self.fileno()):
                    disk.hit("write", lambda: io.FileIO.write(self, memoryview(data).cast("B")[: len(data) // 2]))
                return super().write(data)

        def opened(
            file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
            newline: str | None = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            if not set(mode) & set("wax+"):
                return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

        def os_write(fd: int, data: Any) -> int:
            if disk.covers(fd):
                disk.hit("write", lambda: write(fd, memoryview(data).cast("B")[: len(data) // 2]))
            return write(fd, data)

        def os_pwrite(fd: int, data: Any, offset: int) -> int:
            if disk.covers(fd):
                disk.hit("write", lambda: pwrite(fd, memoryview(data).cast("B")[: len(data) // 2], offset))
            return pwrite(fd, data, offset)

        def os_sendfile(out: int, *args: Any) -> int:
            if disk.covers(out):
                disk.hit("write")
            return sendfile(out, *args)

        def os_fsync(fd: int) -> None:
            if disk.covers(fd):
                disk.hit("fsync")
                disk.synced(fd)
            fsync(fd)

        def renaming(real: Callable[..., None]) -> Callable[..., None]:
            def rename(source: Any, target: Any, **more: Any) -> None:
                if str(Path(target).absolute()).startswith(disk.root):
                    disk.hit("rename")
                    disk.renamed(Path(source), Path(target).absolute())
                real(source, target, **more)

            return rename

        io.open = builtins.open = opened  # type: ignore[assignment]
        os.write, os.pwrite, os.sendfile, os.fsync = os_write, os_pwrite, os_sendfile, os_fsync  # type: ignore[assignment]
        os.rename, os.replace = renaming(os.rename), renaming(os.replace)

    def covers(self, fd: int) -> bool:
        return f"{Path(f'/proc/self/fd/{fd}').readlink()}/".startswith(self.root)

    def hit(self, kind: str, half: Callable[[], object] = lambda: None) -> None:
        self.counts[kind] += 1
        if self.fault is None or self.fault.kind != kind:
            return
        is_full = self.fault.error == errno.ENOSPC
        if self.counts[kind] == self.fault.number or (is_full and self.counts[kind] > self.fault.number):
            half()
            if not self.fault.error:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.fault.error, os.strerror(self.fault.error))

    def synced(self, fd: int) -> None:
        result = os.fstat(fd)
        self._synced[result.st_ino] = (result.st_size, result.st_mtime_ns)
        self._unsynced_names.pop(Path(f"/proc/self/fd/{fd}").readlink(), None)

    def renamed(self, source: Path, target: Path) -> None:
        if target.name == "progress.json":  # Of a run that lasts: after a crash of the machine nobody needs it.
            return
        for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
            result = path.stat()
            is_new = result.st_mtime_ns > self._began_ns
            if path.is_file() and is_new and self._synced.get(result.st_ino) != (result.st_size, result.st_mtime_ns):
                self.problems.append(f"{path.name} was not flushed before {target.name} was named")
        self._unsynced_names[target.parent] = target.name

    def finish(self) -> list[str]:
        remaining = [
            f"{name}: its directory was not flushed" for path, name in self._unsynced_names.items() if path.is_dir()
        ]
        return self.problems + remaining


class Scenario:
    """An operation on a folder. `begin` makes what it starts from; `act` may be repeated; `see` is what a reader finds.

    Each value of what `see` returns must be at any time as before or as after `act`.
    """

    refuses_its_output = False  # Whether `act` fails where an earlier one made the new state.

    def begin(self, folder: Path) -> None: ...
    def act(self, folder: Path) -> None: ...
    def see(self, folder: Path) -> State: ...


def content(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


class Prepare(Scenario):
    to = "dataset"

    def begin(self, folder: Path) -> None:
        lines = [
            f'{{"id": "d{i}", "text": "line {i % 7} of words\\nanother line {i} of some length\\nsame"}}'
            for i in range(30)
        ]
        (folder / "in.jsonl").write_text("\n".join(lines))

    def act(self, folder: Path) -> None:
        from forebay import prepare_dataset
        from forebay.prepare import load_recipe

        recipe = load_recipe(settings={
            "name": "d", "dedup": {"exact": True, "minhash": True, "lines": True}, "slice": {"shuffle": True},
            "tokenize": {"tokenizer": "bytes"},
        })  # fmt: skip
        is_set = self.to == "dataset"
        prepare_dataset(
            [folder / "in.jsonl"], folder / "out", recipe=recipe, workers=1, write_ids=folder / "ids", to=self.to,
            document_ids=is_set,
        )  # fmt: skip

    def see(self, folder: Path) -> State:
        out = folder / "out"
        result: State = {"ids": content(folder / "ids")}
        mark = out / {"dataset": "manifest.json", "megatron": "tokens.json"}.get(self.to, "text.json")
        if not mark.exists():
            return {**result, "out": None}
        aside = (".work/", ".inputs.json")  # The second holds times and inodes of the inputs.
        files = {name: digest for name, digest in hashes(out).items() if not name.startswith(aside)}
        return {**result, "out": files}


class PrepareText(Prepare):
    to = "parquet"


class PrepareMds(Prepare):
    to = "mds"


class PrepareMegatron(Prepare):
    to = "megatron"


class Convert(Scenario):
    force = False
    refuses_its_output = True

    def begin(self, folder: Path) -> None:
        import numpy as np

        for name, start in (("a", 0), ("b", 7)):
            np.save(folder / f"{name}.npy", np.arange(start, start + 20_000, dtype=np.uint16))
        if self.force:
            self.convert(folder, "b")

    def act(self, folder: Path) -> None:
        self.convert(folder, "a", *["--overwrite"] * self.force)

    def convert(self, folder: Path, name: str, *more: str) -> None:
        from forebay.cli import main

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(["convert", str(folder / f"{name}.npy"), str(folder / "out"), "--to", "forebay", *more])
        if code:
            raise OSError(errors.getvalue())

    def see(self, folder: Path) -> State:
        moved = [path for path in folder.glob("out.replaced-*") if not (folder / "out").exists()]
        result = hashes(*moved[:1] or [folder / "out"])
        return {"out": result or None}


class ConvertForce(Convert):
    force = True
    refuses_its_output = False


class CacheFill(Scenario):
    contents = (b"a" * 3000, b"b" * 3000)

    def cache(self, folder: Path) -> Any:
        from forebay.cache.cache import ChunkCache

        return ChunkCache(folder / "cache", 30_000)

    def act(self, folder: Path) -> None:
        from support.cached import put

        cache = self.cache(folder)
        for data in self.contents:
            sha256 = put(cache, data)
            os.utime(cache.path_of(sha256))
            assert cache.get(sha256, pin=True)

    def see(self, folder: Path) -> State:
        cache = self.cache(folder) if (folder / "cache").exists() else None
        paths = [cache and cache.get(hashlib.sha256(data).hexdigest()) for data in self.contents]
        return {str(number): path.read_bytes() if path else None for number, path in enumerate(paths)}


class Import(Scenario):
    def begin(self, folder: Path) -> None:
        import numpy as np

        from forebay.dataset.slices import write_token_slice

        for number in range(3):
            tokens = np.arange(100, dtype=np.uint16)
            write_token_slice(folder / f"{number}.safetensors", tokens, np.array([50, 100], np.uint64))

    def act(self, folder: Path) -> None:
        from forebay.dataset.import_slices import import_slices
        from forebay.dataset.reader import open_dataset

        import_slices(folder, "name")
        open_dataset(folder)

    def see(self, folder: Path) -> State:
        return {"manifest": content(folder / "manifest.json"), "table": content(folder / "slices.parquet")}


class Ledgers(Scenario):
    """Appends until there are five entries; what was acknowledged must be there."""

    def act(self, folder: Path) -> None:
        from forebay.ledger.writer import Ledger

        with Ledger.open(
            folder / "ledger.jsonl", lambda message: hashlib.sha256(message).digest(), now=lambda: 1.0
        ) as it:
            while it.next_seq < 5:
                seq = it.append("job" if not it.next_seq else "note", {"n": it.next_seq}).seq
                Path(f"{folder}.acknowledged").write_text(str(seq))

    def see(self, folder: Path) -> State:
        from forebay.ledger.chain import read_entries

        path, acknowledged = folder / "ledger.jsonl", Path(f"{folder}.acknowledged")
        count = path.read_bytes().count(b"\n") if path.exists() else 0
        if count:
            for entry, _ in zip(read_entries(path), range(count)):
                assert entry.body["n"] == entry.seq
        assert count > int(acknowledged.read_text() if acknowledged.exists() else -1), "an acknowledged entry is lost"
        return {"whole": content(path) if count == 5 else None}


class LedgerQuestions(Scenario):
    def begin(self, folder: Path) -> None:
        from forebay.ledger.writer import Ledger

        body = {
            "name": "j", "seed": 1, "epochs": 1, "dataset_id": "1" * 64, "layout": "tokens", "seq_len": 8,
            "samples_per_slice": [[4, 100]], "scheduler": "0" * 64,
        }  # fmt: skip
        with Ledger.open(
            folder / "ledger.jsonl", lambda message: hashlib.sha256(message).digest(), now=lambda: 1.0
        ) as it:
            it.append("job", body)
            for number in range(20):
                it.append("uses", {"worker": "w", "uses": [["l", 0, number, 0, 4, 1]], "receipt": "00"}, sync=False)

    def act(self, folder: Path) -> None:
        from forebay.ledger.index import open_index
        from forebay.observe.ledger_queries import export_uses

        result = open_index(folder / "ledger.jsonl")
        for form in ("jsonl", "parquet"):
            export_uses(result, folder / f"out.{form}", form)

    def see(self, folder: Path) -> State:
        from forebay.ledger.index import open_index

        result = open_index(folder / "ledger.jsonl")
        uses = result.uses.tobytes().hex()
        assert len(result.uses) == 20
        return {"uses": uses, **{form: content(folder / f"out.{form}") for form in ("jsonl", "parquet")}}


class Shards(Scenario):
    def act(self, folder: Path) -> None:
        import numpy as np

        from forebay.formats.shard_writer import write_shards

        write_shards([np.arange(4096, dtype=np.uint16)], folder / "out", seq_len=64)

    def see(self, folder: Path) -> State:
        return {"shards": hashes(folder / "out") if (folder / "out" / "train_000000.npy").exists() else None}


class Mirror(Scenario):
    """A directory that a mirror fills, from a directory on the same disk."""

    def begin(self, folder: Path) -> None:
        (folder / "in").mkdir()
        Import().begin(folder / "in")
        Import().act(folder / "in")

    def act(self, folder: Path) -> None:
        from forebay.storage.ranged_download import download_large_file

        for name in ("0.safetensors", "manifest.json"):
            download_large_file(folder / "in", name, folder / name)

    def see(self, folder: Path) -> State:
        return {name: content(folder / name) for name in ("0.safetensors", "manifest.json")}


SCENARIOS: dict[str, Scenario] = {
    "prepare": Prepare(), "prepare-text": PrepareText(), "prepare-mds": PrepareMds(),
    "prepare-megatron": PrepareMegatron(), "convert": Convert(), "convert-force": ConvertForce(),
    "cache": CacheFill(), "import": Import(), "ledger": Ledgers(), "ledger-questions": LedgerQuestions(),
    "shards": Shards(), "download": Mirror(),
}  # fmt: skip


def forked(work: Callable[[], int]) -> int:
    """The exit code of a function in a process of its own; negative for a signal."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = BUG
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            code = work()
        except BaseException:  # noqa: BLE001 - the child's own end
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def act(scenario: Scenario, folder: Path, fault: Fault | None, report: Path | None = None) -> int:
    """Run an operation with a fault; 0, FAILED or BUG."""
    from forebay.errors import ForebayError

    disk = Disk(folder, fault)
    disk.install()
    try:
        scenario.act(folder)
    except (OSError, ForebayError):
        return FAILED
    if report is not None:
        lines = [str(disk.counts[kind]) for kind in SHOWN] + disk.finish()
        report.write_text("\n".join(lines))
    return 0


def run(name: str, points: int | None) -> tuple[int, list[str]]:
    """How many faults were tried, and what went wrong."""
    scenario = SCENARIOS[name]
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix=f"faults-{name}-") as temporary:
        home = Path(temporary)
        origin, folder, report = home / "origin", home / "work" / "folder", home / "report"
        origin.mkdir()
        folder.parent.mkdir()
        scenario.begin(origin)

        def reset() -> None:
            shutil.rmtree(folder.parent)
            folder.parent.mkdir()
            shutil.copytree(origin, folder)

        reset()
        scenario.act(folder)  # Imports and compiles for all that follow.
        reset()
        old = scenario.see(folder)
        assert forked(lambda: act(scenario, folder, None, report)) == 0, f"{name} fails without a fault"
        new = scenario.see(folder)
        assert new != old or name in ("cache",)
        lines = report.read_text().splitlines()
        problems += [f"{name}: {line}" for line in lines[3:]]
        faults = [
            Fault(kind, number, error)
            for kind, count in zip(SHOWN, map(int, lines))
            for number in range(1, count + 1)
            for error in (errno.ENOSPC, errno.EIO, 0)
        ]
        if points is not None and points < len(faults):
            faults = [faults[i * len(faults) // points] for i in range(points)]
        for fault in faults:
            reset()
            reported = f"{name}: {fault.kind} {fault.number} of {lines[SHOWN.index(fault.kind)]}"
            reported += f" {errno.errorcode.get(fault.error, 'SIGKILL')}"
            code = forked(lambda fault=fault: act(scenario, folder, fault))  # type: ignore[misc]
            if code not in (0, FAILED, -signal.SIGKILL):
                problems.append(f"{reported}: ended with {code}")
            try:
                seen = scenario.see(folder)
            except Exception as error:  # noqa: BLE001 - whatever a reader would meet
                problems.append(f"{reported}: neither old nor new: {type(error).__name__}: {error}")
                continue
            if invalid := [key for key in seen if seen[key] not in (old.get(key), new.get(key))]:
                problems.append(f"{reported}: neither old nor new: {invalid}")
            if code == 0 and seen != new:
                problems.append(f"{reported}: reported success, but the state is not the new one")
            again = forked(lambda: act(scenario, folder, None))
            if again and not (again == FAILED and seen == new and scenario.refuses_its_output):
                problems.append(f"{reported}: the next run ended with {again}")
            elif scenario.see(folder) != new:
                problems.append(f"{reported}: the next run made other bytes")
            remaining = [path.name for path in folder.rglob("*") if path.name.endswith(LEFT_OVER)]
            if remaining and not again:  # What is refused begins nothing, and so cleans nothing.
                problems.append(f"{reported}: left over after the next run: {remaining[:5]}")
    return len(faults), problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--points", type=int, help="faults a scenario; by default all")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    invalid = 0
    for name in args.scenarios:
        count, problems = run(name, args.points)
        invalid += len(problems)
        print(f"{name}: {count} faults, {len(problems)} problems", flush=True)
        for problem in problems:
            print(f"  {problem}", flush=True)
    return int(invalid > 0)


if __name__ == "__main__":
    sys.exit(main())
