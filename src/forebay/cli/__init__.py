"""The command line: one verb, one function, which returns its exit code (None: 0); each imports what it needs.

Exit 0 done, 1 failed, 2 wrong usage, 130 interrupted. Results go to stdout, everything else to stderr. With `--json`
the last line of stdout is one object, for a failure `{"error": {"type", "message", "hint"}}`.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forebay.cli import data, network, nodes, operate, parser, prepare
from forebay.cli.parser import report_failure
from forebay.errors import ForebayError, UsageError, package_for


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are reported without a traceback."""
    with parser.filtered_streams():
        args = make_parser().parse_args(argv)
        with parser.logging_to_stderr(args):
            return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        if (env_file := getattr(args, "env_file", None)) is not None:
            from forebay.storage.base import load_env_file

            load_env_file(env_file)
        with package_for("this command"):
            return int(args.verb(args) or 0)
    except BrokenPipeError:
        # The reader of our output ended: not a failure. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ForebayError, OSError) as error:
        log_format = getattr(args, "log_format", "text")
        report_failure(type(error).__name__, _message(error), args.json is True, log_format=log_format)
        return 2 if isinstance(error, UsageError) else 1


def _message(error: ForebayError | OSError) -> str:
    """The text of an error for users, with what to do next."""
    if isinstance(error, ForebayError):
        return str(error)
    path = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{path}: {_ADVICE.get(error.errno or 0, 'the operating system refused')}."


_ADVICE = {
    errno.ENOSPC: "the disk is full. Free some space or choose another directory, then run the same command again",
    errno.EDQUOT: "the disk quota is used up. Free some space or choose another directory",
    errno.EACCES: "no permission. Check who owns it",
    errno.EFBIG: "a limit on the size of files. Raise it (ulimit -f), or write to another file system",
    errno.EROFS: "the file system is read-only. Choose another directory",
    errno.ENOENT: "it does not exist. Check the path",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from forebay import __version__

    main_parser = parser.Parser(
        prog="forebay", usage="forebay [OPTIONS] COMMAND ...", description="Raw text in, a GPU that never waits."
    )
    main_parser.add_argument("-V", "--version", action="version", version=f"forebay {__version__}")
    parser.add_options(main_parser)
    identity = os.environ.get("FOREBAY_IDENTITY")
    main_parser.set_defaults(json=False, quiet=False, identity=Path(identity) if identity else None)
    verbs = main_parser.add_subparsers(metavar="COMMAND", required=True, prog="forebay", help=argparse.SUPPRESS)
    abouts: dict[str, str] = {}

    def verb(
        name: str, run: Callable[[Any], int | None], about: str, parent: Any = None, log_level: str = "warning"
    ) -> parser.Parser:
        # The panels list the commands, so the parser of all commands gets no help for them; those of a group do.
        shown: dict[str, Any] = {} if parent is None else {"help": about}
        p: parser.Parser = (parent or verbs).add_parser(name, description=about, **shown)
        p.set_defaults(verb=run, default_log_level=log_level)
        parser.add_options(p)
        if parent is None:
            abouts[name] = about
        return p

    def group(name: str, about: str) -> Any:
        abouts[name] = about
        return verbs.add_parser(name, description=about).add_subparsers(metavar="COMMAND", required=True)

    for commands in (prepare, data, network, nodes, operate):
        commands.add_verbs(verb, group)
    parser.add_verbs(verb, main_parser)
    main_parser.epilog = parser.panels(abouts)
    return main_parser
