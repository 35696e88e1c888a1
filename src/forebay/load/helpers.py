"""Helper processes that make a loader's batches: helper k of n makes steps k, k + n, ... of a pass.

A helper is a new interpreter that opens the loader again; it needs no PyTorch, and nothing of the caller's main module.
It sends several small batches in one message, through shared memory, and stays for later passes.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Generator, Iterator
from functools import partial
from itertools import chain, count
from multiprocessing.connection import Connection
from typing import Any

from forebay.errors import ForebayError
from forebay.load.shared_memory import SegmentReader, SegmentWriter

_BUNDLE_BYTES = 1 << 20
_MAX_BUNDLED = 16  # Batches of a message.
_MAX_SENT = 2  # Messages that a helper sends before the first of them is used up.
_CREDIT = "credit"


class HelperPool:
    """The helper processes of a loader, until `close`; for one iteration at a time.

    Args:
        loader: Pickled to the helpers.
        num_workers: Helper processes.
    """

    scheduler_s = 0.0

    def __init__(self, loader: Any, num_workers: int) -> None:
        self.num_workers = num_workers
        self.network_s = self.disk_s = 0.0  # Those of the helper that waited longest.
        pickled = pickle.dumps(loader)
        self._max_bundled = 1  # Rows of any size.
        if loader.seq_len is not None:
            samples = -(-loader.run.batches.largest // loader.world_size)
            self._max_bundled = min(_MAX_BUNDLED, max(1, _BUNDLE_BYTES // (samples * loader.seq_len * 8)))
        self._iteration = 0
        self._helpers: list[_Helper] = []
        self._close = weakref.finalize(self, _close_all, self._helpers)
        for index in range(num_workers):
            self._helpers.append(_Helper(pickled, index, num_workers))

    def batches(self, start: int, stop: int | None) -> Generator[Any, None, None]:
        """The batches of steps [start, stop), in order.

        Raises:
            ForebayError: After the batches before it: the error of a helper, or that one ended.
        """
        self._iteration += 1
        for helper in self._helpers:
            helper.send((self._iteration, start, stop, self._max_bundled))
        while True:
            bundles: list[list[Any]] = []
            for i in count():
                for index, helper in enumerate(self._helpers):
                    if i == 0:
                        bundles.append(self._receive(helper))
                    if i >= len(bundles[index]):
                        if index == 0 and i > 0:
                            break  # The end of the round, if another comes.
                        if bundles[index]:
                            self._receive(helper)  # Raises the error that ended the helper, if any.
                        return
                    yield bundles[index][i]
                    bundles[index][i] = None
                else:
                    continue
                break
            for helper in self._helpers:
                helper.send(_CREDIT)

    def close(self) -> None:
        """End the processes. May be repeated."""
        self._close()

    def _receive(self, helper: "_Helper") -> list[Any]:
        """The next batches of a helper; none at its end."""
        while True:
            (iteration, error, network_s, disk_s), bundle = helper.receive()
            if iteration == self._iteration:
                break
        self.network_s, self.disk_s = max(self.network_s, network_s), max(self.disk_s, disk_s)
        if error is not None:
            raise error
        return bundle  # type: ignore[no-any-return]


class _Helper(SegmentReader):
    def __init__(self, pickled: bytes, index: int, num_helpers: int) -> None:
        self._name = f"loader's helper process {index} of {num_helpers}"
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from forebay.load.helpers import main; main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], process_group=0,  # Ctrl-C is the parent's, which ends its helpers.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        super().__init__(ours)
        self.send((pickled, index, num_helpers))

    def send(self, message: Any) -> None:
        with self._named():
            self._connection.send(message)

    def receive(self) -> tuple[Any, Any]:
        with self._named():
            return super().receive()

    def close(self) -> None:
        super().close()
        self._socket.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            raise ForebayError(
                f"{self._name}: expected batches, got exit code {self.process.poll()}. Its own message is on stderr; "
                "if it was killed, the machine may lack memory: use fewer helpers (num_workers)."
            ) from error


def _close_all(helpers: "list[_Helper]") -> None:
    for helper in helpers:
        helper.close()  # The process ends when it reads or writes next.
        helper.process.terminate()
    for helper in helpers:
        helper.process.wait()


def main() -> None:
    """Run a helper; the argument is the number of its socket."""
    with socket.socket(fileno=int(sys.argv[1])) as end:
        writer = SegmentWriter(end)
        connection = writer.connection
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # The parent has ended.
            pickled, index, num_helpers = connection.recv()
            loader: Any = None
            command = connection.recv()
            while True:
                try:
                    loader = loader or pickle.loads(pickled)
                    command = _serve(loader, connection, writer, index, num_helpers, *command)
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    raise
                except Exception as error:  # noqa: BLE001  The parent raises it.
                    writer.send([], 0, partial(_failure, command[0], error))
                    command = _next_command(connection)


def _serve(
    loader: Any, connection: Connection, writer: SegmentWriter, index: int, num_helpers: int, iteration: int,
    start: int, stop: int | None, max_bundled: int,
) -> Any:  # fmt: skip
    """Send the batches of an iteration; return the next command."""
    num_sent = 0
    batches = loader.raw_batches(start, stop, (index, num_helpers))
    with contextlib.closing(batches):
        for size in chain([1], (min(1 << i, max_bundled) for i in count())):  # The first batches do not wait.
            while num_sent == _MAX_SENT or connection.poll():
                message = connection.recv()
                if message != _CREDIT:
                    return message
                num_sent -= 1
            if not writer.send(
                batches, size, lambda: (iteration, None, loader.planner.network_s, loader.planner.disk_s)
            ):
                return _next_command(connection)
            num_sent += 1
    raise AssertionError("messages end with an empty one")


def _next_command(connection: Connection) -> Any:
    while (message := connection.recv()) == _CREDIT:
        continue
    return message


def _failure(iteration: int, error: Exception) -> tuple[Any, ...]:
    """The head of a message with an error; one that cannot be pickled is replaced by its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        error = ForebayError(f"{type(error).__name__}: {error}")
    return iteration, error, 0.0, 0.0
