"""Programs that tests start, and the lines of JSON that they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import IO, Any

from support.waiting import until


class Process:
    """A Python program, whose output is read as it comes.

    Attributes:
        output, messages: Lines of standard output and of standard error.
    """

    def __init__(self, *argv: object, **environment: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *map(str, argv)], env=os.environ | environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.output, self.messages = list[str](), list[str]()
        pairs = ((self.popen.stdout, self.output), (self.popen.stderr, self.messages))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: IO[str], lines: list[str]) -> None:
        with stream:
            lines.extend(stream)

    @property
    def lines(self) -> list[Any]:
        """The lines of JSON that it printed."""
        return [json.loads(line) for line in list(self.output) if line[0] in "{["]

    @property
    def errors(self) -> str:
        return "".join(self.messages)

    def ready(self, key: str = "") -> Any:
        """Wait for its first line of JSON, or the first that has `key`."""

        def found() -> list[Any]:
            return [line for line in self.lines if key in line or not key]

        until(lambda: found() or self.popen.poll() is not None)
        assert found(), (self.popen.args, self.errors)
        return found()[0]

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
