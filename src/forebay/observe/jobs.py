"""Job files for Slurm and Kubernetes: a training command on every rank, its cache on the node's own disk.

Hides how each says who a rank is. The loader needs RANK and WORLD_SIZE, which Slurm and indexed jobs give in words of
their own; PyTorch needs MASTER_ADDR and MASTER_PORT besides. The ranks of a node share one cache directory.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.errors import UsageError

PORT = 29500
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
_TIME = re.compile(r"(\d+-)?\d{1,2}:\d\d:\d\d")


@dataclass(frozen=True)
class TrainingJob:
    """What runs, and on what.

    Args:
        command: The program and its arguments, the same for every rank.
        nodes, ranks_per_node: Processes are their product.
        cpus, gpus: Of a rank.
        memory: Of a node, as Kubernetes writes it: `64Gi`.
        time: The most a Slurm job may take, `[D-]HH:MM:SS`.
        cache: A directory of the node's disk, kept between jobs; None (Kubernetes): the pod's own, lost with it.
        cache_bytes: What it may take.
        image: Kubernetes: with Forebay, PyTorch and the program in it.
        partition, account, namespace: Where the cluster wants them.

    Raises:
        UsageError: If a name, time or number is not what both take.
    """

    command: tuple[str, ...]
    name: str = "train"
    nodes: int = 1
    ranks_per_node: int = 1
    cpus: int = 8
    gpus: int = 0
    memory: str = "64Gi"
    time: str = "24:00:00"
    cache: str | None = None
    cache_bytes: int | None = None
    image: str = ""
    partition: str = ""
    account: str = ""
    namespace: str = ""

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("job: expected a command after --, such as `-- python train.py`, got none.")
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"job: expected a name of a-z, 0-9 and '-', up to 52 letters, got {self.name!r}.")
        if not _TIME.fullmatch(self.time):
            raise UsageError(f"job: expected a time such as 24:00:00 or 2-00:00:00, got {self.time!r}.")
        if not re.fullmatch(r"\d+(Mi|Gi|Ti)", self.memory):
            raise UsageError(f"job: expected memory such as 64Gi, got {self.memory!r}.")
        for what in ("partition", "account", "namespace", "image", "cache"):
            if re.search(r"[\s\x00-\x1f]", getattr(self, what) or ""):
                raise UsageError(f"job: expected {what} without spaces, got {getattr(self, what)!r}.")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def slurm_script(job: TrainingJob) -> str:
    """A batch script for `sbatch`. It is queued again when a node fails; the program resumes from its checkpoint."""
    wanted = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.cpus,
        "gpus-per-task": job.gpus or None,
        "mem": job.memory.removesuffix("i"),
        "time": job.time,
        "partition": job.partition or None,
        "account": job.account or None,
        "output": "%x-%j.out",
        "signal": "TERM@120",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None)]
    lines += ["#SBATCH --requeue", "set -euo pipefail", ""]
    lines += ["# The ranks of a node share one cache: each slice is fetched once a node."]
    lines += [f"export FOREBAY_CACHE={shlex.quote(job.cache or '/tmp/forebay-cache')}"]
    lines += ["", "# PyTorch's meeting point: the first node of the job."]
    lines += [
        'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=\"${nodes%%$'\\n'*}\"",
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        'export WORLD_SIZE="$SLURM_NTASKS"',
        "",
        "# shellcheck disable=SC2016  # each rank expands it, not this shell",
        "srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec \"$@\"' rank \\",
        f"  {shlex.join(job.command)}",
    ]
    return "\n".join(lines) + "\n"


def kubernetes_manifest(job: TrainingJob) -> str:
    """A headless Service and an indexed Job, as YAML for `kubectl apply -f`: one pod a node.

    Raises:
        UsageError: If there is no image, or several ranks a node and a command that torchrun cannot start.
    """
    if not job.image:
        raise UsageError("job kubernetes: expected --image with your program and Forebay in it, got none.")
    meta = {"name": job.name, **({"namespace": job.namespace} if job.namespace else {})}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {"clusterIP": "None", "selector": {"job-name": job.name}, "publishNotReadyAddresses": True},
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "containers": [_container(job)],
        "volumes": [_cache_volume(job), {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 10 * job.nodes,
        "template": {"spec": pod},
    }
    indexed = {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}
    return "---\n".join("\n".join(_yaml(one)) + "\n" for one in (service, indexed))


def _container(job: TrainingJob) -> dict[str, Any]:
    master = f"{job.name}-0.{job.name}"
    environment = {
        "FOREBAY_CACHE": "/cache",
        "WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
    }
    limits: dict[str, Any] = {"cpu": str(job.cpus * job.ranks_per_node), "memory": job.memory}
    if job.gpus:
        limits["nvidia.com/gpu"] = str(job.gpus * job.ranks_per_node)
    return {
        "name": "rank",
        "image": job.image,
        "command": _pod_command(job, master),
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _pod_command(job: TrainingJob, master: str) -> list[str]:
    """One rank: the command itself, its rank the pod's index. Several: torchrun starts them."""
    if job.ranks_per_node == 1:
        return ["sh", "-c", 'export RANK="$JOB_COMPLETION_INDEX" LOCAL_RANK=0; exec "$@"', "rank", *job.command]
    if not job.command[0].startswith("python") or len(job.command) < 2:
        raise UsageError(
            f"job kubernetes: expected `python SCRIPT …` for {job.ranks_per_node} ranks a pod, got "
            f"{shlex.join(job.command)!r}. torchrun starts scripts; or take one rank a pod."
        )
    torchrun = (
        f"exec torchrun --nnodes={job.nodes} --nproc-per-node={job.ranks_per_node} "
        f'--node-rank="$JOB_COMPLETION_INDEX" --master-addr={master} --master-port={PORT} "$@"'
    )
    return ["sh", "-c", f"unset WORLD_SIZE; {torchrun}", "ranks", *job.command[1:]]


def _cache_volume(job: TrainingJob) -> dict[str, Any]:
    if job.cache is not None:
        return {"name": "cache", "hostPath": {"path": job.cache, "type": "DirectoryOrCreate"}}
    limit = {} if job.cache_bytes is None else {"sizeLimit": str(job.cache_bytes + (1 << 30))}
    return {"name": "cache", "emptyDir": limit}


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Block style; scalars as JSON, which YAML reads as the same."""
    lines: list[str] = []
    entries: Sequence[tuple[str, Any]]
    if isinstance(value, dict):
        entries = [(f"{indent}{name}:", one) for name, one in value.items()]
    else:
        entries = [(f"{indent}-", one) for one in value]
    for head, one in entries:
        if not isinstance(one, dict | list) or not one:
            lines.append(f"{head} {json.dumps(one)}")
        elif head.endswith("-"):
            first, *rest = _yaml(one, indent + "  ")
            lines += [f"{head} {first.lstrip()}", *rest]
        else:
            lines += [head, *_yaml(one, indent + "  ")]
    return lines
