"""The argument parser: commands in panels, defaults in the help, suggestions for typing errors, shell completion."""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

PANELS = {
    "Data": (
        "prepare", "recipe", "report", "acquire", "inspect", "verify", "import", "convert", "doctor",
        "mirror",
    ),
    "Training": ("plan", "coordinate", "work", "schedule", "ledger"),
    "Network": ("network", "dht", "serve", "find"),
    "Operate": ("status", "probe", "simulate", "demo", "completion"),
}  # fmt: skip


def report_failure(kind: str, text: str, as_json: bool) -> None:
    """Report an error: a line on stderr, and with `--json` an object on stdout."""
    if as_json:
        message, _, hint = text.partition(". ")
        print(json.dumps({"error": {"type": kind, "message": message.rstrip("."), "hint": hint}}))
    print(f"forebay: {text}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of the commands below it."""

    def __init__(self, **options: Any) -> None:
        # `resolve`: demo has a `--json FILE` of its own.
        options = {"allow_abbrev": False, "formatter_class": _Help, "conflict_handler": "resolve", **options}
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """As of argparse; with `--json` also an object on stdout."""
        self.print_usage(sys.stderr)
        report_failure("UsageError", f"{message}. See `{self.prog} --help`.", "--json" in sys.argv)
        sys.exit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of argparse; refuses unknown arguments here, where similar options are known."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            named = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(named, self._option_string_actions)}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = _meant([str(value)], choices) or f". Expected one of {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"{value!r} is not known{near}")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default in (None, False, "", argparse.SUPPRESS) or default == []:
            return text
        shown = f"{default:g}" if isinstance(default, float) else str(default).replace("%", "%%")
        return text if "default" in text or f"({shown})" in text else f"{text} (default: {shown})"


def _meant(words: Iterable[str], candidates: Iterable[str]) -> str:
    candidates = list(candidates)
    near = dict.fromkeys(match for word in words for match in difflib.get_close_matches(word, candidates, 2, 0.6))
    return f". Did you mean {' or '.join(near)}?" if near else ""


def panels(abouts: dict[str, str]) -> str:
    """The commands with their descriptions, by panel."""
    lines = []
    others = abouts.keys() - {name for names in PANELS.values() for name in names}
    for panel, names in {**PANELS, **({"Others": sorted(others)} if others else {})}.items():
        lines += ["", f"{panel}:", *(f"  {name:<11}{abouts[name]}" for name in names if name in abouts)]
    return "\n".join([*lines, "", "`forebay COMMAND --help` shows a command's options."])


def walk(parser: argparse.ArgumentParser, path: Sequence[str] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every parser below one, with its command words."""
    yield tuple(path), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from walk(child, (*path, name))


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script that completes commands, options and files, for bash or zsh."""
    cases = []
    for path, child in walk(parser):
        words = [name for name in child._option_string_actions if name.startswith("--")]
        words += [
            str(name)
            for action in child._actions
            if isinstance(action, argparse._SubParsersAction)
            for name in action.choices
        ]
        cases.append(f'    "{" ".join(path)}") words="{" ".join(sorted(words))}" ;;')
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    paths = "|".join(f'"{" ".join(path)}"' for path, _ in walk(parser) if path)
    return f"""{head}_forebay() {{
  local path="" next words word current="${{COMP_WORDS[COMP_CWORD]}}"
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    next="${{path:+$path }}$word"
    case "$next" in
      {paths}) path="$next" ;;
    esac
  done
  case "$path" in
{chr(10).join(cases)}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current"))
}}
complete -o filenames -F _forebay forebay
"""


def add_verbs(verb: Any, main_parser: argparse.ArgumentParser) -> None:
    """Adds `forebay completion`."""

    def run(args: argparse.Namespace) -> int:
        print(completion(main_parser, args.shell), end="")
        return 0

    p = verb("completion", run, 'print a completion script: eval "$(forebay completion bash)"')
    p.add_argument("shell", choices=["bash", "zsh"], help="the shell")
