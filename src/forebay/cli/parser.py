"""The argument parser and the output of commands: panels, suggestions for typing errors, shell completion, log lines.

Texts of files are printed, too: control characters are filtered here once more.
"""

import argparse
import datetime as dt
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from forebay.errors import PrintableUrl, did_you_mean, printable

PANELS = {
    "Data": (
        "prepare", "warm", "inspect", "verify", "report", "import", "extract", "convert", "doctor", "mirror",
    ),
    "Network": ("network", "dht", "serve", "find", "scheduler", "job", "worker", "coordinator"),
    "Operate": ("status", "top", "dashboard", "plan", "ledger", "launch"),
    "Try": ("demo", "simulate", "completion"),
}  # fmt: skip
LEVELS = ("debug", "info", "warning", "error")


def report_failure(kind: str, text: str, as_json: bool, *, log_format: str = "text") -> None:
    """Report an error: a line on stderr, and with `--json` an object on stdout."""
    if as_json:
        message, _, hint = text.partition(". ")
        with suppress(OSError):  # It may be the error that is reported.
            print(json.dumps({"error": {"type": kind, "message": message.rstrip("."), "hint": hint}}))
    if log_format == "json":
        logging.getLogger("forebay.cli").error("%s", text)
    else:
        print(f"forebay: {text}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of the commands below it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **options})

    _words: Sequence[str] = ()
    takes_command = False
    """Whether what stands behind `--` is a command of its own: `args.command`, a list."""

    def add(self, name: str, help: str, kind: Any = None, default: Any = None, **options: Any) -> None:
        """Add an argument. `kind`: how its value is called, what parses it (which may have a `metavar`), or a list of
        its values. `values`: a function that returns some, for completion."""
        match kind:
            case str():
                options["metavar"] = kind
            case list() | tuple():
                options["choices"] = kind
            case _:
                options = {"type": kind, "metavar": getattr(kind, "metavar", None), **options}
        if "action" not in options and options.get("type") is None:
            options["type"] = PrintableUrl  # Any may be a URL, whose secrets no output has.
        values = options.pop("values", list)
        vars(self.add_argument(name, help=help, default=default, **options))["values"] = values

    def add_flag(self, name: str, help: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, help=help, action="store_true")

    def add_list(self, flag: str, help: str, kind: Any) -> None:
        """Add an option that may be repeated."""
        self.add(flag, help, kind, [], action="append")

    def error(self, message: str) -> NoReturn:
        """As of argparse; with `--json` also an object on stdout."""
        options = self._option_string_actions
        unknown = [word for word in self._words if word.startswith("--") and word.partition("=")[0] not in options]
        if unknown and message.startswith("the following arguments are required"):  # argparse reports these first.
            message = f"unrecognized arguments: {PrintableUrl(unknown[0])}.{did_you_mean(unknown[0], options)}"
        stop = "" if message.endswith(("?", ".")) else "."
        report_failure("UsageError", f"{message}{stop} See `{self.prog} --help`.", "--json" in sys.argv)
        sys.exit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of argparse; refuses unknown arguments here, where similar options are known."""
        command = []
        args = list(sys.argv[1:] if args is None else args)
        position = args.index("--") if "--" in args else len(args)
        self._words = args[:position]
        if self.takes_command and position < len(args):
            args, command = self._words, args[position + 1 :]
            if not command:
                self.error("expected a command behind --")
        namespace, unknown = super().parse_known_args(args, namespace)
        if self.takes_command:
            namespace.command = command
        if unknown:
            named = next((text.partition("=")[0] for text in unknown if text.startswith("-")), "")
            hint = did_you_mean(named, self._option_string_actions)
            if self.takes_command and not (command or unknown[0].startswith("-")):
                hint = f" Write -- before a command: {self.prog} … -- {' '.join(map(PrintableUrl, unknown))}"
            self.error(f"unrecognized arguments: {' '.join(map(PrintableUrl, unknown))}.{hint}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = did_you_mean(value, choices) or f" Expected one of {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"{PrintableUrl(value)!r} is not known.{near}")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default in (None, False, "", argparse.SUPPRESS) or default == []:
            return text
        shown = f"{default:g}" if isinstance(default, float) else str(default).replace("%", "%%")
        return text if "default" in text or f"({shown})" in text else f"{text} (default: {shown})"


def panels(abouts: dict[str, str]) -> str:
    """The commands with their descriptions, by panel."""
    lines = []
    for panel, names in PANELS.items():
        lines += ["", f"{panel}:", *(f"  {name:<12}{abouts[name]}" for name in names)]
    return "\n".join([*lines, "", "`forebay COMMAND --help` shows a command's options."])


def walk(parser: argparse.ArgumentParser, path: Sequence[str] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every parser below one, with its command words."""
    yield tuple(path), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from walk(child, (*path, name))


_FILES = dict.fromkeys(("FILE", "PATH", "INPUT", "SRC", "DST", "OUT", "DATASET", "T"), "-f") | {"DIR": "-d"}


def _completions(action: argparse.Action) -> tuple[str, str]:
    """The values of an argument, and compgen's option if it takes files or directories."""
    if action.choices is not None:
        return " ".join(map(str, action.choices)), ""
    values = " ".join(dict.fromkeys(getattr(action, "values", list)()))
    is_path = action.type is Path or (action.metavar is None and not action.option_strings and action.nargs != 0)
    return values, "" if values else _FILES.get(str(action.metavar), "-f" if is_path else "")


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script that completes commands, options, their values and files, for bash, zsh or fish."""
    values, words = [], []  # (path, flags, takes a value, values, files) of options; (path, words, files) of commands
    for path, child in walk(parser):
        names = [name for name in child._option_string_actions if name.startswith("--")]
        names += [part[-1] for part, _ in walk(child) if len(part) == 1]
        takes = [action for action in child._actions if not action.option_strings and action.nargs != argparse.PARSER]
        operands = list(map(_completions, takes))
        files = next((kind for _, kind in operands if kind), "")
        words.append((" ".join(path), " ".join([*sorted(names), *(text for text, _ in operands if text)]), files))
        for action in child._actions:
            if action.option_strings:
                values.append((" ".join(path), action.option_strings, action.nargs != 0, *_completions(action)))
    if shell == "fish":
        return _fish(values, words)
    cases = [
        f"    {'|'.join(repr(f'{path} {flag}') for flag in flags)}) words='{text}' files={kind} ;;"
        for path, flags, takes_value, text, kind in values
        if takes_value
    ]
    commands = [f"      '{path}') words='{text}' files={kind} ;;" for path, text, kind in words]
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    paths = "|".join(f"'{path}'" for path, _, _ in words if path)
    return f"""{head}_forebay() {{
  local path="" next word words="" files="" before="" current="${{COMP_WORDS[COMP_CWORD]}}"
  local previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  [[ "$current" == "=" ]] && current=""
  [[ "$previous" == "=" ]] && previous="${{COMP_WORDS[COMP_CWORD-2]}}"
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
    next="${{path:+$path }}$word"
    case "$next" in
      {paths}) path="$next" ;;
    esac
  done
  case "$path $previous" in
{chr(10).join(cases)}
    *) case "$path" in
{chr(10).join(commands)}
    esac ;;
  esac
  [[ -n "$words" && "$current" == *,* ]] && before="${{current%,*}},"
  COMPREPLY=($(compgen -P "$before" -W "$words" -- "${{current#"$before"}}"))
  [[ -n "$files" && "$current" != -* ]] && COMPREPLY+=($(compgen $files -- "$current"))
}}
complete -o filenames -F _forebay forebay
"""


def _fish(values: Iterable[tuple[str, Sequence[str], bool, str, str]], words: Iterable[tuple[str, str, str]]) -> str:
    kinds = {"-f": "-r -F", "-d": "-x -a '(__fish_complete_directories)'", "": "-x"}
    paths = " ".join(f"'{path}'" for path, _, _ in words if path)
    lines = [
        "complete -c forebay -f",
        "function __forebay_at",
        "  set -l path ''",
        "  for word in (commandline -opc)[2..-1]",
        f'    contains -- (string trim "$path $word") {paths}; and set path (string trim "$path $word")',
        "  end",
        '  test "$path" = "$argv[1]"',
        "end",
    ]
    for path, text, kind in words:
        names = " ".join(name for name in text.split() if not name.startswith("-"))
        lines.append(f"complete -c forebay -n \"__forebay_at '{path}'\" -a '{names}' {'-F' if kind else ''}")
    for path, flags, takes_value, text, kind in values:
        names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in flags)
        value = (f"-x -a '(__fish_append , {text})'" if text else kinds[kind]) if takes_value else ""
        lines.append(f"complete -c forebay -n \"__forebay_at '{path}'\" {names} {value}")
    return "\n".join([*lines, ""])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command takes, before or after its name."""
    add = partial(parser.add_argument_group("shared").add_argument, default=argparse.SUPPRESS)
    add("--json", action="store_true", help="print results, and errors, as JSON")
    add("-q", "--quiet", action="store_true", help="show no progress")
    add("-v", "--verbose", action="count", help="log more: info, and twice: debug")
    add(
        "--env-file",
        metavar="FILE",
        help="take R2_DATASET_* that are not set from this file, and nothing else (default: FOREBAY_ENV_FILE)",
    )
    add("--identity", metavar="DIR", type=Path, help="this node, by `network join` (default: FOREBAY_IDENTITY)")
    add("--log-level", choices=LEVELS, help="default: info for servers, else warning")
    add("--log-format", choices=("text", "json"), help="of lines on stderr; default: text")


@contextmanager
def logging_to_stderr(args: argparse.Namespace) -> Iterator[None]:
    """Log according to the arguments while the block runs; `args.default_log_level` is the verb's default."""
    level = str(getattr(args, "log_level", "") or args.default_log_level)
    if verbose := getattr(args, "verbose", 0):
        level = "debug" if verbose > 1 or level == "debug" else "info"
    is_json, stderr, handler = getattr(args, "log_format", "text") == "json", sys.stderr, logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter() if is_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root, logger = logging.getLogger(), logging.getLogger("forebay")
    before = logger.level
    root.addHandler(handler)  # Warnings of libraries, too.
    logger.setLevel(level.upper())
    if is_json:
        sys.stderr = _Stream(stderr, _logged_lines())
        logging.captureWarnings(True)
    try:
        yield
    except Exception:
        if not is_json:
            raise
        logger.exception("internal error")
        raise SystemExit(1) from None
    finally:
        sys.stderr = stderr
        root.removeHandler(handler)
        logger.setLevel(before)
        if is_json:
            logging.captureWarnings(False)


_FIELD = re.compile(r"(?:(\w+)=)?%[-#0 +]*[\d.]*([a-zA-Z%])")


class _JsonFormatter(logging.Formatter):
    """An object a line. The `key=value` pairs of a message are fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        conversions = [match for match in _FIELD.finditer(str(record.msg)) if match[2] != "%"]
        values = record.args if isinstance(record.args, tuple) else ()
        fields = {match[1]: _plain(value) for match, value in zip(conversions, values) if match[1]}
        body = {
            **fields,
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().rstrip("\n"),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body)


def _plain(value: object) -> object:
    """A number that JSON has, or a text."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else str(value)


@dataclass(eq=False)
class _Stream:
    """A text stream that writes otherwise than another; all else is the other's own."""

    _stream: TextIO
    _convert: Callable[[str], str]

    def write(self, text: str) -> int:
        self._stream.write(self._convert(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _logged_lines() -> Callable[[str], str]:
    """A function that makes each line a log line: for what is printed to stderr, by libraries too."""
    rest, formatter = "", _JsonFormatter()

    def convert(text: str) -> str:
        nonlocal rest
        *lines, rest = (rest + text.replace("\r", "\n")).split("\n")
        records = (
            logging.LogRecord("forebay.stderr", logging.INFO, "", 0, line, None, None)
            for line in filter(str.strip, lines)
        )
        return "".join(f"{formatter.format(record)}\n" for record in records)

    return convert


@contextmanager
def filtered_streams() -> Iterator[None]:
    """While the block runs, stdout and stderr are filtered. Bytes written to their `buffer` are not."""
    stdout, stderr = sys.stdout, sys.stderr
    with Path(os.devnull).open("w") as nowhere:  # It takes the place of a closed stdout.
        sys.stdout = _Stream(stdout or nowhere, partial(printable, keep="\n\t"))
        sys.stderr = _Stream(stderr or nowhere, partial(printable, keep="\n\t\r"))  # of a progress line
        try:
            yield
        finally:
            sys.stdout, sys.stderr = stdout, stderr


def add_verbs(verb: Any, main_parser: argparse.ArgumentParser) -> None:
    """Add `forebay completion`."""

    def run(args: argparse.Namespace) -> None:
        print(completion(main_parser, args.shell), end="")

    p = verb("completion", run, 'print a completion script: eval "$(forebay completion bash)"')
    p.add("shell", "the shell", ["bash", "zsh", "fish"])
