"""Several processes of one preparation, on machines that share nothing but the output: `--task I/N` of a job array.

Each runs the whole preparation, and of its tasks those that it claims: first every N-th, then what the others have not
begun. A claim is an object that is put if it does not exist; it lapses when the beat of the process that made it has
not changed for a minute. Claims only save work: if two run a task, one result stands. So processes may start late,
die, or never start; one that ends has seen all results.
"""

import logging
import os
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from forebay.errors import UsageError
from forebay.files import HOST
from forebay.prepare.engines import base
from forebay.prepare.engines.local import LocalEngine
from forebay.prepare.progress import Failure, label, name_of
from forebay.prepare.results import Committing, TaskOutput
from forebay.storage.retry import log_while_waiting
from forebay.storage.store import Store

log = logging.getLogger("forebay.prepare")
BEAT_S, STALE_S = 10.0, 60.0
_MIN_POLL_S, _MAX_POLL_S = 0.5, 15.0


def parse_share(text: str) -> tuple[int, int]:
    """The index, from 0, and the number of processes in `I/N`."""
    match = re.fullmatch(r"(\d{1,7})/(\d{1,7})", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise UsageError(f"task: expected I/N with I from 0 to N - 1, got {text!r}.")
    return int(match[1]), int(match[2])


class ShareEngine(LocalEngine):
    """Process `index` of `count`; `store` is that of the run's work."""

    _runs_tasks_here = False  # Ticks, and so beats, must not wait for a task.

    def __init__(
        self, workers: int | None, index: int, count: int, store: Store, on_message: base.Notify = lambda message: None
    ) -> None:
        super().__init__(workers, on_message=on_message)
        self._index, self._count, self._store = index, count, store
        self._name = f"{index}-{HOST}-{os.getpid()}-{secrets.token_hex(4)}"
        self._num_beats, self._beaten_at = 0, -BEAT_S
        self._folder = ""  # Of the claims of the tasks that run.
        self._generations: dict[str, int] = {}  # Of tasks whose claims lapsed: how many.
        self._claims: dict[str, str] = {}  # Of tasks that others claimed: the claim.
        self._lapsed: dict[str, str] = {}  # Of tasks that others claimed and lost: the process that had the claim.
        self._beats: dict[str, tuple[bytes, float]] = {}  # Of others: the last that was read, and when it was first.

    def map(
        self, run: base.TaskFunction, tasks: Sequence[Any], on_done: base.OnDone, weights: base.Weights = None
    ) -> None:
        assert isinstance(run, Committing)
        positions = {name_of(task): position for position, task in enumerate(tasks)}
        self._folder = f"claims/{run.step}"
        self._generations, self._claims, self._lapsed = {}, {}, {}
        awaited, pause_s = "", _MIN_POLL_S
        with log_while_waiting(log, lambda: awaited):
            while positions:
                unclaimed = [p for name, p in positions.items() if name not in self._claims]
                unclaimed.sort(key=lambda p: ((p - self._index) % self._count, p))

                def done(number: int, output: Any, unclaimed: list[int] = unclaimed) -> None:
                    del positions[name_of(tasks[unclaimed[number]])]
                    on_done(unclaimed[number], output)

                super().map(run, [tasks[p] for p in unclaimed], done)
                results = run.load(positions)
                for name, result in results.items():
                    on_done(positions.pop(name), TaskOutput(result))
                awaited = ""
                if unclaimed or results:
                    pause_s = _MIN_POLL_S
                elif positions:
                    awaited = (
                        f"{len(positions)} tasks of other processes ({', '.join(self._beats)}): "
                        f"{', '.join(label(tasks[p]) for p in list(positions.values())[:3])}"
                    )
                    self._tick()
                    time.sleep(pause_s)
                    pause_s = min(_MAX_POLL_S, 1.5 * pause_s)
                for name in [name for name in self._claims if name in positions and self._is_stale(self._claims[name])]:
                    self._generations[name] = self._generations.get(name, 0) + 1
                    self._lapsed[name] = self._store.read(self._claims.pop(name)).decode("ascii", "replace")

    def _may_start(self, task: Any) -> bool:
        """Whether this process has the claim of a task."""
        name = name_of(task)
        claim = f"{self._folder}/{name}.{self._generations.get(name, 0)}"
        if self._store.create(claim, self._name.encode()):
            if (owner := self._lapsed.pop(name, "")) != "":
                self._take_over(task, owner)
            return True
        self._claims[name] = claim
        return False

    def _take_over(self, task: Any, owner: str) -> None:
        """Report the loss of the process that had the claim of a task."""
        index, _, process = owner.partition("-")
        host, _, pid = process.rpartition("-")[0].rpartition("-")
        how = f"was claimed by job {index} ({host}), which has given no sign for {STALE_S:.0f} s"
        self._on_message(f"{label(task)} {how}: it runs again here")
        attempt = self._generations[name_of(task)]
        process_id = int(pid) if pid.isdigit() else 0
        self.on_failure(task, Failure("lost", label(task), how, host=host, pid=process_id, attempt=attempt))

    def _is_stale(self, claim: str) -> bool:
        owner = self._store.read(claim).decode("ascii", "replace")
        try:
            beat = self._store.read(f"beats/{owner}")
        except FileNotFoundError:  # it died at once
            beat = b""
        last, since = self._beats.get(owner, (None, 0.0))
        if beat != last:
            since = time.monotonic()
            self._beats[owner] = beat, since
        return time.monotonic() - since >= STALE_S

    def _tick(self) -> None:
        if time.monotonic() - self._beaten_at >= BEAT_S:
            self._num_beats, self._beaten_at = self._num_beats + 1, time.monotonic()
            self._store.write(f"beats/{self._name}", str(self._num_beats).encode())
        super()._tick()
