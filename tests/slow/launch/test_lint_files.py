"""Files for other programs, read by those programs' linters and schemas: containers, clusters, units, workflows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from forebay.launch import KINDS, render, write
from support.paths import ROOT

COMMAND = ["python", "train.py", "two words", "$HOME", "it's"]
KUBERNETES = ("1.29", "1.37")


def run(program: str, *arguments: object, cwd: Path | None = None) -> str:
    """The output of a program beside this interpreter, or on PATH, which must exit 0; the test skips without it."""
    beside = Path(sys.executable).parent / program
    path = str(beside) if beside.exists() else shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    ran = subprocess.run([path, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def launched(directory: Path, kind: str, **settings: str) -> list[Path]:
    required = {key: "train.1" for key, setting in KINDS[kind].settings.items() if setting.default is None}
    return write(directory, render(kind, required | settings, COMMAND))


def test_the_dockerfile(tmp_path, monkeypatch):
    """Linted; and where buildah has the base image, built, and the whole pipeline is run in it."""
    run("hadolint", ROOT / "Dockerfile")
    monkeypatch.setenv("STORAGE_DRIVER", os.environ.get("STORAGE_DRIVER", "vfs"))  # needs no kernel module
    if not run("buildah", "images", "--quiet", "--filter", "reference=python:3.13-slim-bookworm"):
        pytest.skip("no base image: buildah pull docker.io/library/python:3.13-slim-bookworm")
    (tmp_path / "Dockerfile").write_text("FROM localhost/forebay-test\nRUN forebay demo\n")
    build = ("buildah", "bud", "--isolation=chroot", "--pull-never", "--format=docker", "--layers=false")
    run(*build, "--tag=forebay-test", ROOT)
    assert "demo: ok" in run(*build, "--tag=forebay-demo", tmp_path)
    run("buildah", "rmi", "forebay-demo", "forebay-test")


def test_compose_files(tmp_path):
    (file,) = launched(tmp_path, "compose", workers="12", build=".")
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", file, ROOT / "compose.yaml")


def test_shell_scripts(tmp_path):
    files = [ROOT / "scripts" / "release.sh"]
    for kind in ("slurm", "kubernetes-network", "systemd"):
        files += [file for file in launched(tmp_path / kind, kind) if file.suffix in (".sh", ".sbatch")]
    (pods,) = launched(tmp_path / "kubernetes", "kubernetes")
    setup = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["setup"]
    join = yaml.safe_load_all((tmp_path / "kubernetes-network" / "network.yaml").read_text())
    inner = {"setup": setup["command"][0].replace("$$", "$")}
    for document in [*join, *yaml.safe_load_all(pods.read_text())]:
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        for container in [*pod.get("initContainers", ()), *pod.get("containers", ())]:
            if container["command"][0] == "sh":
                inner[f"{document['metadata']['name']}-{container['name']}"] = container["command"][2]
    assert len(inner) == 7
    for name, script in inner.items():
        files.append(tmp_path / f"{name}.sh")
        files[-1].write_text(f"#!/bin/sh\n{script}\n")
    run("shellcheck", "-x", *files, cwd=ROOT)


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests(tmp_path, version):
    files = launched(tmp_path / "ranks", "kubernetes", name="yes", cpu="0.5", memory="10")
    files += launched(tmp_path / "torchrun", "kubernetes", ranks_per_pod="8", gpus="8")
    files += [file for file in launched(tmp_path / "network", "kubernetes-network", dataset="1e3", gpus="1")
              if file.name == "network.yaml"]  # fmt: skip
    objects = [item for file in files for item in yaml.safe_load_all(file.read_text())]
    output = run("kubernetes-validate", "--strict", "--kubernetes-version", version, *files)
    assert len(objects) >= 12
    for item in objects:
        assert (
            f"passed for resource {item['kind'].lower()}/{item['metadata']['name']} against version {version}" in output
        )


def test_a_kustomization_is_built(tmp_path):
    launched(tmp_path, "kubernetes-network", name="lab")
    for name in ("network.json", "root-cert.pem", "org-cert.pem", "org-key.pem"):
        (tmp_path / "issuer").mkdir(exist_ok=True)
        (tmp_path / "issuer" / name).write_text(name)
    for role in ("data", "scheduler", "viewer", "worker"):
        (tmp_path / f"{role}.token").write_text("token")
    built = list(yaml.safe_load_all(run("kubectl", "kustomize", tmp_path)))
    secrets = {item["metadata"]["name"]: set(item["data"]) for item in built if item["kind"] == "Secret"}
    used = {
        volume["secret"]["secretName"]
        for item in built
        for volume in item.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", ())
        if "secret" in volume
    }
    roles = {f"lab-{role}-token" for role in ("data", "scheduler", "viewer", "worker")}
    assert secrets.keys() == used == {"lab-issuer", *roles}
    assert secrets["lab-worker-token"] == {"token"} and len(secrets["lab-issuer"]) == 4


def test_units(tmp_path):
    files = launched(tmp_path, "systemd", program=sys.executable, data="/srv/100% $x")
    output = run("systemd-analyze", "verify", "--man=no", *(file for file in files if file.suffix == ".service"))
    assert not [line for line in output.splitlines() if "forebay-" in line]


def test_files_of_the_forge():
    directory = ROOT / ".github"
    workflows = sorted((directory / "workflows").glob("*.yml"))
    run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    run("check-jsonschema", "--builtin-schema", "custom.github-workflows-require-timeout", *workflows)
    run("check-jsonschema", "--builtin-schema", "vendor.dependabot", directory / "dependabot.yml")
    forms = sorted(set((directory / "ISSUE_TEMPLATE").glob("*.yml")) - {directory / "ISSUE_TEMPLATE" / "config.yml"})
    run("check-jsonschema", "--builtin-schema", "vendor.github-issue-forms", *forms)
    config = directory / "ISSUE_TEMPLATE" / "config.yml"
    run("check-jsonschema", "--builtin-schema", "vendor.github-issue-config", config)
