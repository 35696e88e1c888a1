"""Nodes that start in a few milliseconds: one process imports `forebay` and forks a node for each command.

Each fork is a process of its own (own pid, own memory, kill -9 hits it alone), runs `forebay ARGV` in a network
namespace, and dies with its parent. What is saved is half a second of imports a node. `module NAME ARG` calls `main` of
a module instead.

    python forks.py        reads {"ns", "argv", "log"} lines; prints {"pid"} and {"exit", "code"} lines
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

from support.waiting import until

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


class Forks:
    """The process that forks, from construction to `close`; every fork is killed with it."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._pids = queue.Queue()
        self._codes = {}
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, ns: str, argv: list[str], log: Path) -> Process:
        """`forebay ARGV` in a namespace ("" is this one); its output goes to `log` and `log`.err."""
        self._popen.stdin.write(json.dumps({"ns": ns, "argv": argv, "log": str(log)}) + "\n")
        self._popen.stdin.flush()
        return Process(self, self._pids.get(), log)

    def code(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a fork, negative for a signal; None if it still runs after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, timeout_s)
            return self._codes.get(pid)

    def close(self) -> None:
        self._popen.stdin.close()
        self._popen.wait()
        self._reader.join()

    def _read(self):
        with self._popen.stdout as lines:
            for line in lines:
                fact = json.loads(line)
                if "pid" in fact:
                    self._pids.put(fact["pid"])
                else:
                    with self._changed:
                        self._codes[fact["exit"]] = fact["code"]
                        self._changed.notify_all()


class Process:
    """One node."""

    def __init__(self, forks: Forks, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self._forks = forks

    def lines(self) -> list[dict]:
        """The JSON lines that it printed."""
        full = self.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in full.splitlines() if line.startswith("{")]

    def errors(self) -> str:
        return self.log.with_name(self.log.name + ".err").read_text()

    def ready(self) -> dict:
        """Wait for its first JSON line."""
        until(lambda: self.lines() or self.wait(0.0) is not None)
        lines = self.lines()
        assert lines, f"{self.log.name}: {self.errors()}"
        return lines[0]

    def wait(self, timeout_s: float = 60.0) -> int | None:
        """Its exit code, negative for a signal; None if it still runs."""
        return self._forks.code(self.pid, timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.wait(0.0) is None:
            with contextlib.suppress(ProcessLookupError):  # It has ended, and we have not read so yet.
                os.kill(self.pid, number)


def enter(ns: str) -> None:
    """Move this process (of one thread) into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{ns}", os.O_RDONLY)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {ns}")
    os.close(descriptor)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _node(ns, argv, log):
    code = 70
    try:
        die_with_parent()
        for path, number in ((log, 1), (f"{log}.err", 2), (os.devnull, 0)):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(path, flags, 0o644), number)
        if ns:
            enter(ns)
        if argv[0] == "module":
            import_module(argv[1]).main(*argv[2:])
            code = 0
        else:
            from forebay.cli import main

            code = main(argv) or 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else 1
    except BaseException:  # noqa: BLE001  # the fork must never go on in its parent's loop
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main():
    import libtorrent  # noqa: F401

    import forebay.cli
    import forebay.data_node
    import forebay.load.lease_order
    import forebay.load.loader
    import forebay.network.dht
    import forebay.scheduler.server
    import forebay.worker.command  # noqa: F401

    die_with_parent()
    children = set()
    pending = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            piece = os.read(0, 65536)
            if not piece:
                break
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _node(order["ns"], order["argv"], order["log"])
                children.add(pid)
                print(json.dumps({"pid": pid}), flush=True)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children.discard(pid)
            print(json.dumps({"exit": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main()
