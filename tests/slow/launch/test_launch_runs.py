"""Files of `forebay launch`, run by the shells that a cluster would start them with: ranks know who they are."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

from forebay.launch import render
from support.launched import HOSTILE, manifest

ENVIRONMENT = (
    "import json, os, sys; print(json.dumps([os.environ.get(n) for n in sys.argv[1].split(',')] + sys.argv[2:]))"
)
COMMAND = [sys.executable, "-c", ENVIRONMENT, "RANK,WORLD_SIZE,LOCAL_RANK,MASTER_ADDR,FOREBAY_CACHE", *HOSTILE]


def program(path: Path, text: str):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_slurm_script_gives_each_task_its_rank(tmp_path):
    """Run by bash with an `srun` that starts the tasks as Slurm does, one after another."""
    program(tmp_path / "scontrol", '#!/bin/bash\nprintf "node-a\\nnode-b\\n"\n')
    loop = 'for i in 0 1 2 3; do SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) "$@"; done'
    program(tmp_path / "srun", f"#!/bin/bash\nshift; {loop}\n")
    settings = {"nodes": "2", "ranks_per_node": "2", "cache": "/nvme/it's $HOME"}
    text = render("slurm", settings, COMMAND)["train.sbatch"]
    (tmp_path / "train.sbatch").write_text(text)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node-[a-b]",
    }  # fmt: skip
    environment.pop("FOREBAY_CACHE", None)
    ran = subprocess.run(
        ["bash", tmp_path / "train.sbatch", "added"], env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    reported = [json.loads(line) for line in ran.stdout.splitlines()]
    expected = ["4", "0", "node-a", "/nvme/it's $HOME", *HOSTILE, "added"]
    assert reported == [[str(i), "4", str(i % 2), *expected[2:]] for i in range(4)]


def expanded(command: list[str]) -> list[str]:
    """Return a pod's command as its kubelet passes it on: `$$` is `$`; there is no `$(VARIABLE)`."""
    assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", word) for word in command[3:])
    return [word.replace("$$", "$") for word in command]


def test_a_manifest_gives_each_pod_its_rank():
    """The pod's command, run with the variables that an indexed job sets."""
    _, container = manifest({"name": "true"}, COMMAND)
    value = {entry["name"]: entry["value"] for entry in container["env"]}
    for index in range(2):
        environment = {**os.environ, **value, "JOB_COMPLETION_INDEX": str(index)}
        ran = subprocess.run(expanded(container["command"]), env=environment, capture_output=True, text=True)
        assert json.loads(ran.stdout) == [str(index), "2", "0", "true-0.true", "/cache/forebay", *HOSTILE], ran.stderr


def test_several_ranks_a_pod_are_torchruns(tmp_path):
    settings = {"pods": "3", "ranks_per_pod": "8", "gpus": "8"}
    indexed, container = manifest(settings, ["python", "train.py", *HOSTILE])
    program(tmp_path / "torchrun", f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    words = json.loads(subprocess.run(expanded(container["command"]), env=environment, capture_output=True).stdout)
    assert dict(word.split("=", 1) for word in words[:5]) == {
        "--nnodes": str(indexed["spec"]["completions"]), "--node-rank": "1", "--master-addr": "train-0.train",
        "--nproc-per-node": container["resources"]["limits"]["nvidia.com/gpu"], "--master-port": "29500",
    }  # fmt: skip
    assert words[5:] == ["--no-python", "python", "train.py", *HOSTILE]
    assert "WORLD_SIZE" not in {entry["name"] for entry in container["env"]}  # torchrun sets it
