"""Log lines on stderr, as text or JSON: one handler on the package's logger while a command runs."""

import argparse
import datetime as dt
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every command takes, before or after its name."""
    group = parser.add_argument_group("logging")
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
    """Log as the arguments say while the block runs; `args.default_log_level` is the verb's own default."""
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
    """Writes to what stderr is now, not to what it was at the start."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and traceback where there is one."""

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
