"""Programs that tests start, and the lines of JSON that they print."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.waiting import until


class Process:
    """A Python program, whose output is read as it comes.

    Attributes:
        output, messages: Lines of standard output and of standard error.
        lines: The values of the lines of JSON in its output.
    """

    def __init__(self, *argv: object, **environment: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *map(str, argv)], env=os.environ | environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.output, self.messages, self.lines = [], [], []
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_output, self._read_messages)
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self):
        assert self.popen.stdout is not None
        with self.popen.stdout as stream:
            for line in stream:
                self.output.append(line)
                if line[0] in "{[":
                    self.lines.append(json.loads(line))

    def _read_messages(self):
        assert self.popen.stderr is not None
        with self.popen.stderr as stream:
            self.messages.extend(stream)

    @property
    def errors(self) -> str:
        return "".join(self.messages)

    def ready(self, key: str = "") -> Any:
        """Wait for its first line of JSON, or the first that has `key`."""

        def matches():
            return [line for line in self.lines if key in line or not key]

        until(lambda: matches() or self.popen.poll() is not None)
        assert matches(), (self.popen.args, self.errors)
        return matches()[0]

    def wait(self) -> int:
        """Return its status once it has ended and all its output was read."""
        code = self.popen.wait()
        for reader in self._readers:
            reader.join()
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        return code

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal, and wait."""
        self.popen.send_signal(number)
        return self.wait()


def forebay(*argv: object, **environment: str) -> Process:
    """A command of `forebay`."""
    return Process("-m", "forebay", *argv, **environment)


Start = Callable[..., Process]
"""A function that starts a process as `forebay` does, and ends it with the test."""


def run_command(
    *argv: object, code: int | None = 0, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of `forebay` to its end, with this status, or any of a failure if it is None."""
    command = [sys.executable, "-m", "forebay", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | environment)
    assert done.returncode in ((1, 2) if code is None else (code,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done
