"""The command that runs a whole network in virtual time."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from forebay.cli.arguments import positive, rate, seconds, size


def _simulate(args: argparse.Namespace) -> int:
    from forebay.observe.progress import bar
    from forebay.simulate import SimulationSettings, simulate

    given = {field.name: getattr(args, field.name, None) for field in fields(SimulationSettings)}
    settings = SimulationSettings(**{name: value for name, value in given.items() if value is not None})
    shown = 0

    with bar("simulate", 100, "%", enabled=not args.json) as advance:

        def progress(done: float) -> None:
            nonlocal shown
            advance(int(100 * done) - shown)
            shown = int(100 * done)

        result = simulate(settings, progress)
    if not result.ok or not args.json:
        print(result.to_text(), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(result.to_json()))
    return 0 if result.ok else 1


_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "workers": (positive, "machines that train (1000)"),
    "slices": (positive, "of the dataset (10000)"),
    "churn": (float, "share of the workers that are killed at random moments (0)"),
    "replace": (float, "share of the killed that new machines replace (1)"),
    "seed": (int, "another seed, another world (0)"),
    "epochs": (positive, "how often every sample is used (1)"),
    "samples": (positive, "of a slice (512)"),
    "batch": (positive, "samples of a worker's step (8)"),
    "slice-bytes": (size, "of a slice (64MiB)"),
    "speed": (float, "samples a second of the median worker (4)"),
    "spread": (float, "of speeds, links and latencies: sigma of their logarithms (0.4)"),
    "up": (rate, "a worker's link up (100Mb/s)"),
    "down": (rate, "a worker's link down (200Mb/s)"),
    "origins": (positive, "data nodes that hold everything (1)"),
    "origin-up": (rate, "a data node's link up (10Gb/s)"),
    "latency-s": (seconds, "one way, in seconds (0.03)"),
    "replace-s": (seconds, "seconds until a killed machine is replaced (30)"),
    "liars": (float, "share of the workers that serve wrong bytes, none, or refuse (0)"),
    "slow": (float, "share of the workers that are ten times as slow (0)"),
    "restarts": (int, "how often the scheduler is killed (0)"),
    "outage-s": (seconds, "seconds until it is back (10)"),
    "partitions": (int, "how often a tenth of the workers is cut off (0)"),
    "partition-s": (seconds, "seconds of each (60)"),
    "lost": (float, "share of the requests to the scheduler that get no reply, or come late (0)"),
    "cache": (positive, "slices that a worker keeps (64)"),
    "fetches": (positive, "slices that a worker fetches at once (4)"),
    "lease-s": (seconds, "seconds that a lease lives without contact (30)"),
    "exchange-s": (seconds, "seconds between two words of a worker with the scheduler (5)"),
    "steal-s": (seconds, "leases are cut only of who needs longer than this (2)"),
    "stall-s": (seconds, "a worker that uses nothing for so long loses its leases (600)"),
    "deadline-s": (seconds, "fail if a sample is used later than this"),
}


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    about = "a whole network in virtual time, on the real code; exit 1 if a sample is lost"
    p = verb("simulate", _simulate, about)
    for flag, (kind, about) in _OPTIONS.items():
        p.add_argument(f"--{flag}", type=kind, help=about)
