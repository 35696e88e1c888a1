"""`forebay launch`: what its files say, that ranks know who they are, and that no value changes a file's structure."""

import json
import os
import re
import shlex

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli import main
from forebay.errors import UsageError
from forebay.launch import KINDS, quote_unit, quote_yaml, render
from support.containers import without_dollars
from support.launched import HOSTILE


def test_options_of_a_slurm_script_come_before_its_first_command():
    """`sbatch` reads no further."""
    settings = {"nodes": "2", "ranks_per_node": "2", "gpus_per_node": "2", "account": "a1"}
    lines = render("slurm", settings, HOSTILE)["train.sbatch"].splitlines()
    expected = {"nodes=2", "ntasks-per-node=2", "gpus-per-node=2", "account=a1", "requeue"}
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert expected <= {lines[number].removeprefix("#SBATCH --") for number in options}
    assert not any("--partition" in line for line in lines)
    assert all(line.startswith("#") for line in lines[: options[-1]])


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_quoted_words_are_read_as_they_were(text):
    assert without_dollars(yaml.safe_load(quote_yaml(text))) == text
    assert "\n" not in quote_yaml(text) and shlex.split(shlex.quote(text)) == [text]
    if text.isprintable():
        inner = re.fullmatch(r'"((?:[^"\\]|\\.)*)"', quote_unit(text))
        assert inner and re.sub(r"\\(.)|(%)%|(\$)\$", r"\1\2\3", inner[1]) == text


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_value_of_another_form_is_refused(kind):
    command = ["python", "train.py"]
    for key, setting in KINDS[kind].settings.items():
        assert setting.default is None or re.fullmatch(setting.pattern, setting.default), key
        for value in ("", "a\nb", "\x1b[2J", "x\u2028", "x: y", "$(id)", '"', "-1", "../x"):
            if value.isprintable() and re.fullmatch(setting.pattern, value):
                continue
            with pytest.raises(UsageError, match=rf"launch {kind}: {key} \(.*\): expected "):
                render(kind, {key: value}, command)
    with pytest.raises(UsageError, match=r"expected one of name, .*, got 'nodez'"):
        render(kind, {"nodez": "1"}, command)
    for word in ("\0", "\udcff"):
        with pytest.raises(UsageError, match="a NUL byte or bytes that are not UTF-8"):
            render(kind, {}, [word])


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_placeholder_is_left(kind):
    required = {key: "train.1" for key, setting in KINDS[kind].settings.items() if setting.default is None}
    for text in [*render(kind, required, ["python", "train.py"]).values(), *KINDS[kind].next_steps]:
        assert not re.search(r"<[a-z_ -]+>|replace|example|todo|your[ -]|change.?me", text, re.I)
    for key in required:
        with pytest.raises(UsageError, match=f"expected {key} .*Give --set {key}=VALUE"):
            render(kind, {}, ["python", "train.py"])


def test_hostile_paths_are_mounts_and_nothing_else():
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


def test_files_are_written_once(tmp_path, capsys):
    arguments = ["launch", "systemd", str(tmp_path / "a b"), "--json", "--set=host=10.0.0.1"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert sorted(result["files"]) == sorted(str(path) for path in (tmp_path / "a b").iterdir())
    assert shlex.split(result["next"][2]) == ["sh", str(tmp_path / "a b" / "keys.sh")]
    assert main(arguments) == 0  # the same text
    before = {path: path.read_bytes() for path in (tmp_path / "a b").iterdir()}
    assert main([*arguments, "--set", "seq_len=2"]) == 2
    assert "expected no file" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "a b").iterdir()} == before
    (tmp_path / "file").touch()
    assert main(["launch", "systemd", str(tmp_path / "file"), "--set=host=a"]) == 1
    assert main(["launch", "compose", str(tmp_path / "d"), f"--set=texts={os.path.relpath(tmp_path)}/t"]) == 0
    (mount, *_) = yaml.safe_load((tmp_path / "d" / "compose.yaml").read_text())["services"]["setup"]["volumes"]
    assert mount["source"] == "./../t"  # of the file
    assert main(["launch", "slurm", str(tmp_path)]) == 2 and main(["launch", "compose", "--set", "x"]) == 2
