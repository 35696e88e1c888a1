"""`forebay job`: a training command as a job file for Slurm or Kubernetes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from forebay.cli.arguments import positive, size


def _job(args: argparse.Namespace) -> int:
    from forebay.observe.jobs import TrainingJob, kubernetes_manifest, slurm_script

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    given = {name: value for name, value in vars(args).items() if name in TrainingJob.__dataclass_fields__}
    job = TrainingJob(**{**given, "command": tuple(command)})
    print(slurm_script(job) if args.cluster == "slurm" else kubernetes_manifest(job), end="")
    return 0


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    kinds = group("job", "a training command as a job file: on every rank, its cache on the node's own disk")
    for cluster, about in (("slurm", "a batch script for sbatch"), ("kubernetes", "an indexed Job for kubectl")):
        p = verb(cluster, _job, about, kinds)
        p.set_defaults(cluster=cluster)
        p.add_argument("--name", default="train", help="the job's")
        p.add_argument("--nodes", type=positive, default=1, help="machines")
        p.add_argument("--ranks-per-node", type=positive, default=1, metavar="N", help="processes of a machine")
        p.add_argument("--cpus", type=positive, default=8, help="of a rank (default: 8)")
        p.add_argument("--gpus", type=int, default=0, help="of a rank (0)")
        p.add_argument("--memory", default="64Gi", help="of a node (default: 64Gi)")
        p.add_argument("--cache", metavar="DIR", help="on the node's own disk, kept between jobs")
        if cluster == "slurm":
            p.add_argument("--time", default="24:00:00", help="[D-]HH:MM:SS")
            p.add_argument("--partition", default="", help="Slurm's partition")
            p.add_argument("--account", default="", help="whose hours it takes")
        else:
            p.add_argument("--image", default="", help="with your program, Forebay and PyTorch in it")
            p.add_argument("--namespace", default="", help="where the Job is made")
            p.add_argument("--cache-bytes", type=size, help="of a pod's own cache, where no --cache is given")
        p.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="python train.py --steps 1000")
