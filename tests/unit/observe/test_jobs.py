"""Job files: what they say, and that the ranks which they start know who they are."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from calibration import scaled
from forebay.errors import UsageError
from forebay.load.arguments import rank_of_world
from forebay.observe.jobs import TrainingJob, kubernetes_manifest, slurm_script

WHO = "import json, os, sys; print(json.dumps([os.environ.get(n) for n in sys.argv[1].split(',')] + sys.argv[2:]))"
JOB = TrainingJob((sys.executable, "-c", WHO, "RANK,WORLD_SIZE,LOCAL_RANK,MASTER_ADDR", "two words"), nodes=2)


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
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(replace(JOB, ranks_per_node=2, gpus=1, partition="big", cache="/nvme/it")))
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[a-b]",
    }  # fmt: skip
    ran = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=scaled(30))
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert told == [[str(i), "4", str(i % 2), "node-a", "two words"] for i in range(4)]
    wanted = [line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if "#SBATCH" in line]
    assert {"nodes=2", "ntasks-per-node=2", "gpus-per-task=1", "partition=big", "requeue"} <= set(wanted)
    assert script.read_text().index("FOREBAY_CACHE=/nvme/it") > script.read_text().rindex("#SBATCH")


def parts(job: TrainingJob) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    service, indexed = yaml.safe_load_all(kubernetes_manifest(job))
    return service, indexed, indexed["spec"]["template"]["spec"]["containers"][0]


def test_a_manifest_gives_each_pod_its_rank() -> None:
    """The pod's command, run with the variables that an indexed job sets."""
    service, indexed, container = parts(replace(JOB, image="registry.example/me:1"))
    assert indexed["spec"]["completionMode"] == "Indexed"
    assert indexed["spec"]["completions"] == indexed["spec"]["parallelism"] == 2
    assert service["spec"]["selector"] == {"job-name": indexed["metadata"]["name"]}
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    for index in range(2):
        environment = {**os.environ, **given, "JOB_COMPLETION_INDEX": str(index)}
        ran = subprocess.run(container["command"], env=environment, capture_output=True, text=True, timeout=scaled(30))
        assert json.loads(ran.stdout) == [str(index), "2", "0", "train-0.train", "two words"], ran.stderr


def test_an_indexed_pod_is_a_rank_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert rank_of_world(None, None) == (3, 8)
    monkeypatch.setenv("RANK", "5")
    assert rank_of_world(None, None) == (5, 8)


def test_several_ranks_a_pod_are_torchruns() -> None:
    job = replace(JOB, image="i", ranks_per_node=4, gpus=1, command=("python", "train.py", "--steps", "9"), cache="/d")
    _, indexed, container = parts(job)
    assert "torchrun --nnodes=2 --nproc-per-node=4" in container["command"][2]
    assert container["command"][-3:] == ["train.py", "--steps", "9"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {"name": "cache", "hostPath": {"path": "/d", "type": "DirectoryOrCreate"}} in (
        indexed["spec"]["template"]["spec"]["volumes"]
    )
    with pytest.raises(UsageError, match="torchrun starts scripts"):
        kubernetes_manifest(replace(job, command=("train",)))


@pytest.mark.parametrize(
    "change",
    [{"command": ()}, {"name": "No Good"}, {"time": "soon"}, {"memory": "64 GB"}, {"partition": "a b\n#SBATCH"}],
)
def test_what_no_cluster_takes_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="job: expected"):
        replace(JOB, **change)
    with pytest.raises(UsageError, match="--image"):
        kubernetes_manifest(JOB)
