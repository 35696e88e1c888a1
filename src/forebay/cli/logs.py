"""Output of commands: options for output and logging, and filtering of control characters.

Log lines go to stderr, as text or JSON, by one handler on the package's logger while a command runs. Names, reasons and
error messages come from other members and from files: an escape sequence in one could rename a window, hide lines or
type for the user.
"""

import argparse
import datetime as dt
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command takes, before or after its name."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print results, and errors, as JSON"
    )
    group.add_argument("-q", "--quiet", action="store_true", default=argparse.SUPPRESS, help="show no progress")
    group.add_argument(
        "-v", "--verbose", action="count", default=argparse.SUPPRESS, help="log more: info, and twice: debug"
    )
    group.add_argument(
        "--log-level", choices=LEVELS, default=argparse.SUPPRESS, help="default: info for servers, else warning"
    )
    group.add_argument(
        "--log-format", choices=("text", "json"), default=argparse.SUPPRESS, help="of lines on stderr; default: text"
    )


@contextmanager
def logging_to_stderr(args: argparse.Namespace) -> Iterator[None]:
    """Log according to the arguments while the block runs; `args.default_log_level` is the verb's default."""
    level = str(getattr(args, "log_level", "") or getattr(args, "default_log_level", "warning"))
    if verbose := getattr(args, "verbose", 0):
        level = "debug" if verbose > 1 or level == "debug" else "info"
    handler = _Stderr()
    if getattr(args, "log_format", "text") == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("forebay")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current stderr."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        body = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body)


# Control characters (C0, C1) but line feed and tab, and unpaired surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_UNSAFE_BUT_RETURN = re.compile(_UNSAFE.pattern.replace("\x0b-", "\x0b\x0c\x0e-"))


def printable(text: str, *, allow_return: bool = False) -> str:
    """Replace control characters by their escapes: `\\x1b`. `allow_return` keeps carriage returns, which restart a
    progress line."""
    pattern = _UNSAFE_BUT_RETURN if allow_return else _UNSAFE
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _Filter:
    """A text stream that writes through `printable`; all else is the stream's own."""

    def __init__(self, stream: TextIO, allow_return: bool) -> None:
        self._stream = stream
        self._allow_return = allow_return

    def write(self, text: str) -> int:
        self._stream.write(printable(text, allow_return=self._allow_return))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def filtered_streams() -> Iterator[None]:
    """While the block runs, stdout and stderr are filtered. Bytes written to their `buffer` are not."""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = _Filter(stdout, False)
    sys.stderr = _Filter(stderr, True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
