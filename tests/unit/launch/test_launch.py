"""`forebay launch`: what its files say, that ranks know who they are, and that no value changes a file's structure."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli import main
from forebay.errors import UsageError
from forebay.launch import KINDS, quote_unit, quote_yaml, render
from forebay.load.arguments import rank_of_world
from support.containers import without_dollars
from support.runner import ROOT

ENVIRONMENT = (
    "import json, os, sys; print(json.dumps([os.environ.get(n) for n in sys.argv[1].split(',')] + sys.argv[2:]))"
)
HOSTILE = [
    "two words",
    "$HOME",
    "$(id)",
    "`id`",
    "';id;'",
    '"; id #',
    "a: b",
    "{{ name }}",
    "%h\\n",
    "é\t\n- x",
    "\x9b",
]
COMMAND = [sys.executable, "-c", ENVIRONMENT, "RANK,WORLD_SIZE,LOCAL_RANK,MASTER_ADDR,FOREBAY_CACHE", *HOSTILE]


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_slurm_script_gives_each_task_its_rank(tmp_path: Path) -> None:
    """Run by bash with an `srun` that starts the tasks as Slurm does, one after another."""
    program(tmp_path / "scontrol", '#!/bin/bash\nprintf "node-a\\nnode-b\\n"\n')
    loop = 'for i in 0 1 2 3; do SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) "$@"; done'
    program(tmp_path / "srun", f"#!/bin/bash\nshift; {loop}\n")
    settings = {"nodes": "2", "ranks_per_node": "2", "gpus_per_node": "2", "cache": "/nvme/it's $HOME", "account": "a1"}
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
    lines = text.splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", "#SBATCH --gpus-per-node=2", "#SBATCH --account=a1",
            "#SBATCH --requeue"} <= {lines[i] for i in options}  # fmt: skip
    assert "--partition" not in text
    assert all(line.startswith("#") for line in lines[: options[-1]])  # sbatch reads no further than the first command


def manifest(settings: dict[str, str], command: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An indexed Job, and its container, after the checks that hold for all."""
    (text,) = render("kubernetes", settings, command).values()
    service, indexed = yaml.safe_load_all(text)
    spec = indexed["spec"]
    assert (service["kind"], indexed["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"] == int(settings.get("pods", 2))
    pod = spec["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": indexed["metadata"]["name"]}
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(entry["value"], str) for entry in container["env"])
    return indexed, container


def expanded(command: list[str]) -> list[str]:
    """A pod's command as its kubelet passes it on: `$$` is `$`; there is no `$(VARIABLE)`."""
    assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", word) for word in command[3:])
    return [word.replace("$$", "$") for word in command]


def test_a_manifest_gives_each_pod_its_rank() -> None:
    """The pod's command, run with the variables that an indexed job sets."""
    _, container = manifest({"name": "true"}, COMMAND)
    value = {entry["name"]: entry["value"] for entry in container["env"]}
    for index in range(2):
        environment = {**os.environ, **value, "JOB_COMPLETION_INDEX": str(index)}
        ran = subprocess.run(expanded(container["command"]), env=environment, capture_output=True, text=True)
        assert json.loads(ran.stdout) == [str(index), "2", "0", "true-0.true", "/cache", *HOSTILE], ran.stderr


def test_several_ranks_a_pod_are_torchruns(tmp_path: Path) -> None:
    settings = {"pods": "3", "ranks_per_pod": "8", "gpus": "8"}
    indexed, container = manifest(settings, ["python", "train.py", *HOSTILE])
    program(tmp_path / "torchrun", f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    command = expanded(container["command"])
    words = json.loads(subprocess.run(command, env=environment, capture_output=True).stdout)
    assert dict(word.split("=", 1) for word in words[:5]) == {
        "--nnodes": str(indexed["spec"]["completions"]), "--node-rank": "1", "--master-addr": "train-0.train",
        "--nproc-per-node": container["resources"]["limits"]["nvidia.com/gpu"], "--master-port": "29500",
    }  # fmt: skip
    assert words[5:] == ["--no-python", "python", "train.py", *HOSTILE]
    assert "WORLD_SIZE" not in {entry["name"] for entry in container["env"]}  # torchrun sets it


def test_an_indexed_pod_is_a_rank_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert rank_of_world(None, None) == (3, 8)
    monkeypatch.setenv("RANK", "5")
    assert rank_of_world(None, None) == (5, 8)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_quoted_words_are_read_as_they_were(text: str) -> None:
    assert without_dollars(yaml.safe_load(quote_yaml(text))) == text
    assert "\n" not in quote_yaml(text) and shlex.split(shlex.quote(text)) == [text]
    if text.isprintable():
        inner = re.fullmatch(r'"((?:[^"\\]|\\.)*)"', quote_unit(text))
        assert inner and re.sub(r"\\(.)|(%)%|(\$)\$", r"\1\2\3", inner[1]) == text


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_value_of_another_form_is_refused(kind: str) -> None:
    command = ["python", "train.py"]
    for key, setting in KINDS[kind].settings.items():
        assert re.fullmatch(setting.pattern, setting.default), key
        for value in ("", "a\nb", "\x1b[2J", "x\u2028", "x: y", "$(id)", '"', "-1", "../x"):
            if value.isprintable() and re.fullmatch(setting.pattern, value):
                continue
            with pytest.raises(UsageError, match=rf"launch {kind}: {key} \(.*\): expected "):
                render(kind, {key: value}, command)
    with pytest.raises(UsageError, match=r"expected a setting of name, .*, got 'nodez'"):
        render(kind, {"nodez": "1"}, command)
    for word in ("\0", "\udcff"):
        with pytest.raises(UsageError, match="a NUL byte or bytes that are not UTF-8"):
            render(kind, {}, [word])


def test_hostile_paths_are_mounts_and_nothing_else() -> None:
    for path in ['./it\'s "$HOME" & co', "/a: b, c}", "-", "# x", "{{ name }}", "%h"]:
        settings = {"data": path, "texts": path, "build": path}
        file = without_dollars(yaml.safe_load(render("compose", settings, HOSTILE)["compose.yaml"]))
        plain = without_dollars(yaml.safe_load(render("compose", {"build": "x"}, ["x"])["compose.yaml"]))
        assert file["services"].keys() == plain["services"].keys()
        for name, service in file["services"].items():
            binds = [volume["source"] for volume in service.get("volumes", ()) if volume["type"] == "bind"]
            assert set(binds) <= {path} and service["build"] == path
            assert service.keys() == plain["services"][name].keys()
        assert file["services"]["worker-1"]["command"][-len(HOSTILE) - 1 :] == ["--", *HOSTILE]


def test_files_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", "systemd", str(tmp_path / "a b"), "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert sorted(result["files"]) == sorted(str(path) for path in (tmp_path / "a b").iterdir())
    assert shlex.split(result["next"][1]) == ["sh", str(tmp_path / "a b" / "keys.sh")]
    assert main(arguments) == 0  # the same text
    before = {path: path.read_bytes() for path in (tmp_path / "a b").iterdir()}
    assert main([*arguments, "--set", "seq_len=2"]) == 2
    assert "expected no file" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "a b").iterdir()} == before
    (tmp_path / "file").touch()
    assert main(["launch", "systemd", str(tmp_path / "file")]) == 1
    assert main(["launch", "slurm", str(tmp_path)]) == 2 and main(["launch", "compose", "--set", "x"]) == 2


def test_the_compose_file_of_the_repository_is_launched() -> None:
    settings = {
        "build": ".", "dataset": "code", "texts": "./src/forebay/formats", "slice_bytes": "8KiB", "seq_len": "64",
    }  # fmt: skip
    assert (ROOT / "compose.yaml").read_text() == render("compose", settings, [])["compose.yaml"]
