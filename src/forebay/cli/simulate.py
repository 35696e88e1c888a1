"""The command that runs a whole network in virtual time."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.cli.arguments import positive, show
from forebay.errors import UsageError


def _simulate(args: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from forebay.observe.progress import bar
    from forebay.simulate import Scenario, simulate
    from forebay.toml import read_toml

    options = ("workers", "slices", "churn", "seed", "epochs")
    values = read_toml(args.scenario) if args.scenario else {}
    values |= {name: value for name in options if (value := getattr(args, name)) is not None}
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"simulate: {'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}."
        ) from error
    shown = 0

    with bar("simulate", 100, "%", enabled=not args.json) as advance:

        def progress(done: float) -> None:
            nonlocal shown
            advance(int(100 * done) - shown)
            shown = int(100 * done)

        result = simulate(scenario, progress)
    show(result.to_json(), args.json)
    if not result.ok:
        settings = ", ".join(f"{k} = {v}" for k, v in scenario.model_dump(exclude_defaults=True).items())
        print(f"simulate: failed with seed {scenario.seed}. Repeat it with: {settings}", file=sys.stderr)
    return 0 if result.ok else 1


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    about = "a whole network in virtual time, on the real code; exit 1 if a sample is lost"
    p = verb("simulate", _simulate, about)
    p.add_argument("--workers", type=positive, metavar="N", help="machines that train (1000)")
    p.add_argument("--slices", type=positive, metavar="N", help="slices of the dataset (10000)")
    p.add_argument("--churn", type=float, metavar="X", help="share of the workers that are killed and replaced (0)")
    p.add_argument("--seed", type=int, metavar="N", help="seed of all random choices (0)")
    p.add_argument("--epochs", type=positive, metavar="N", help="how often every sample is used (1)")
    p.add_argument(
        "--scenario", type=Path, metavar="FILE", help="TOML with these and further settings: links, faults, timeouts"
    )
