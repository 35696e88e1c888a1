"""Job files in `examples`: what they say, and that the ranks which they start know who they are."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.load.arguments import rank_of_world
from support.calibration import scaled

EXAMPLES = Path(__file__).parents[3] / "examples"
WHO = "import json, os, sys; print(json.dumps([os.environ.get(n) for n in sys.argv[1].split(',')] + sys.argv[2:]))"
COMMAND = [sys.executable, "-c", WHO, "RANK,WORLD_SIZE,LOCAL_RANK,MASTER_ADDR,FOREBAY_CACHE", "two words"]


def test_a_slurm_script_gives_each_task_its_rank(tmp_path: Path) -> None:
    """Run by bash with an `srun` that starts the tasks as Slurm does, one after another."""
    tools = {
        "scontrol": 'printf "node-a\\nnode-b\\n"',
        "srun": 'shift; for i in 0 1 2 3; do SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) "$@"; done',
    }
    for name, text in tools.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/bash\n{text}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    script = EXAMPLES / "slurm" / "train.sbatch"
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FOREBAY_CACHE": "/nvme/it",
        "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[a-b]",
    }  # fmt: skip
    ran = subprocess.run(
        ["bash", script, *COMMAND], env=environment, capture_output=True, text=True, timeout=scaled(30)
    )
    assert ran.returncode == 0, ran.stderr
    reported = [json.loads(line) for line in ran.stdout.splitlines()]
    assert reported == [[str(i), "4", str(i % 2), "node-a", "/nvme/it", "two words"] for i in range(4)]
    lines = script.read_text().splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert {"#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1", "#SBATCH --requeue"} <= {lines[i] for i in options}
    assert all(line.startswith("#") for line in lines[: options[-1]])  # sbatch reads no further than the first command


def manifest(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A Service, an indexed Job, and its container, which belong together."""
    service, indexed = yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text())
    spec = indexed["spec"]
    assert (service["kind"], indexed["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"] == 2
    pod = spec["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": indexed["metadata"]["name"]}
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(entry["value"], str) for entry in container["env"])
    return service, indexed, container


def test_a_manifest_gives_each_pod_its_rank() -> None:
    """The pod's command, run with the variables that an indexed job sets."""
    _, _, container = manifest("train.yaml")
    value = {entry["name"]: entry["value"] for entry in container["env"]}
    command = container["command"]
    assert command[3:5] == ["rank", "python"]
    for index in range(2):
        environment = {**os.environ, **value, "JOB_COMPLETION_INDEX": str(index)}
        ran = subprocess.run(
            [*command[:4], *COMMAND], env=environment, capture_output=True, text=True, timeout=scaled(30)
        )
        assert json.loads(ran.stdout) == [str(index), "2", "0", "train-0.train", "/cache", "two words"], ran.stderr


def test_several_ranks_a_pod_are_torchruns(tmp_path: Path) -> None:
    _, indexed, container = manifest("train-torchrun.yaml")
    reported = tmp_path / "torchrun"
    reported.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    reported.chmod(reported.stat().st_mode | stat.S_IXUSR)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    words = subprocess.run(container["command"], env=environment, capture_output=True, text=True, timeout=scaled(30))
    options = dict(word.split("=", 1) for word in words.stdout.splitlines()[:5])
    assert options == {
        "--nnodes": str(indexed["spec"]["completions"]), "--node-rank": "1", "--master-addr": "train-0.train",
        "--nproc-per-node": container["resources"]["limits"]["nvidia.com/gpu"], "--master-port": "29500",
    }  # fmt: skip
    assert words.stdout.splitlines()[5:] == ["train.py", "--steps", "1000"]
    assert "WORLD_SIZE" not in {entry["name"] for entry in container["env"]}  # torchrun says it


def test_an_indexed_pod_is_a_rank_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert rank_of_world(None, None) == (3, 8)
    monkeypatch.setenv("RANK", "5")
    assert rank_of_world(None, None) == (5, 8)
