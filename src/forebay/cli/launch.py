"""Command `forebay launch`: write the files that run Forebay on a cluster or in containers."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from forebay.cli.arguments import add_settings, folder, print_result
from forebay.errors import UsageError
from forebay.launch import KINDS, render, write


def _launch(args: argparse.Namespace) -> None:
    values = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"launch: --set: expected KEY=VALUE, such as name=train, got {text!r}.")
        values[key] = value
    paths = write(args.directory, render(args.kind, values, args.command))
    name = values.get("name", KINDS[args.kind].settings["name"].default)
    steps = [step.format(out=shlex.quote(str(args.directory)), name=name) for step in KINDS[args.kind].next_steps]
    files = list(map(str, paths))
    print_result(args, {"files": files, "next": steps}, *files, *(f"next: {step}" for step in steps))


def _settings() -> str:
    lines = []
    for kind, about in KINDS.items():
        lines += ["", f"settings of {kind}:"]
        lines += [f"  {f'{key}={item.default}':<34}{item.about}" for key, item in about.settings.items()]
    return "\n".join(lines)


def add_verbs(verb: Any, group: Any) -> None:
    p = verb("launch", _launch, "write the files that run Forebay on a cluster or in containers, filled in")
    p.takes_command, p.usage = True, "forebay launch KIND [DIR] [OPTIONS] [-- COMMAND ARG ...]"
    p.epilog = f"COMMAND: the program of every rank or worker, such as `python train.py`\n{_settings()}"
    p.add("kind", ", ".join(KINDS), "KIND", choices=list(KINDS))
    p.add("directory", "for the files (default: here)", folder, Path(), nargs="?")
    add_settings(p, "name=train")
