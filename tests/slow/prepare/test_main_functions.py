"""What a script without a guard, or a notebook cell, defines is used by several processes, once by each engine."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from pathlib import Path
import forebay
LEAST = 3
def is_long(text):
    return len(text) > LEAST
@forebay.text_filter("long", version="1", per_document=True)
def long(document, factor: int = 1):
    return is_long(document["text"] * factor) or bool(1 / FAULT - 1)
class Lines:
    name, version = "lines", "1"
    def parts(self):
        return ["a", "b"]
    def read(self, part):
        yield from ({"text": f"{part} {i * i}"} for i in range(8))
print("main")
result = forebay.prepare_dataset(Lines(), OUT, tokenizer="bytes", filters=[long()], workers=2, engine=ENGINE)
print(result.documents_in, result.dropped)
"""


def run(tmp_path: Path, how: str, fault: int = 1, engine: str = "local") -> "subprocess.CompletedProcess[str]":
    program = f"FAULT, ENGINE, OUT = {fault}, {engine!r}, {how.strip('-') + engine!r}\n{PROGRAM}"
    (tmp_path / "script.py").write_text(program)
    commands = {"script": ["script.py"], "stdin": ["-"], "-c": ["-c", program], "-i": ["-i", "script.py"]}
    command, text = [sys.executable, *commands[how]], program if how == "stdin" else ""
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=tmp_path, check=False)


@pytest.mark.parametrize("how", ["script", "stdin", "-c", "-i"])
def test_functions_of_the_main_module(tmp_path, how: str):
    done = run(tmp_path, how)
    assert done.stdout.splitlines() == ["main", "16 {'long': 8}"], done.stderr
    assert "Traceback" not in done.stderr


def test_functions_of_the_main_module_on_ray(tmp_path):
    pytest.importorskip("ray")
    assert run(tmp_path, "script", engine="ray").stdout.splitlines() == ["main", "16 {'long': 8}"]


def test_an_error_names_the_place_in_the_function(tmp_path):
    done = run(tmp_path, "script", fault=0)
    line = (tmp_path / "script.py").read_text().partition("1 / FAULT")[0].count("\n") + 1
    assert done.stderr.count("Traceback") == 1 and f"script.py:{line})" in done.stderr.splitlines()[-1]
