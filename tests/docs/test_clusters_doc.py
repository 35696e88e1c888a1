"""What docs/how-to/cluster.md tells people to run is at least well-formed."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from support.paths import ROOT

PAGE = ROOT / "docs" / "how-to" / "cluster.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_scripts_are_bash() -> None:
    scripts = [script for script in blocks("text") if script.startswith("#!")]
    assert len(scripts) == 2
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr
    assert sum("#SBATCH" in script for script in scripts) == 2


def test_the_job_of_kuberay_is_whole() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (text,) = blocks("yaml")
    job: dict[str, Any] = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        spec = pod["template"]["spec"]
        secrets = [source["secretRef"]["name"] for container in spec["containers"] for source in container["envFrom"]]
        assert secrets == ["bucket-credentials"]
        assert all(isinstance(value, str) for value in pod["rayStartParams"].values())
