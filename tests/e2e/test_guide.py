"""The dataset guide does what it says: its code blocks run, in order, against a hub on this machine.

Runs are cut to two steps; all else stands as it is printed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.prepare.tokens.tokenizers import byte_tokenizer
from forebay.schedule.coordinator import Coordinator
from hub_server import TOKEN, HubServer, make_hub

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "dataset-guide.md"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STEPS = re.compile(r"num_steps=[\d_]+")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hub = make_hub(tmp_path_factory.mktemp("hub"))
    # A vocabulary of bytes under the name gpt2: GPT-2's own takes half a second to load, and a hundred times the steps.
    (hub / "models/gpt2/tokenizer.json").write_text(byte_tokenizer().to_str())
    return hub


@pytest.fixture
def hub(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("FOREBAY_HUB_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.syspath_prepend(str(ROOT / "compat" / "src"))
    with HubServer(repositories) as server, Coordinator("127.0.0.1", 0) as coordinator:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("FOREBAY_COORDINATOR", coordinator.address)
        yield server


def blocks(text: str, language: str) -> list[str]:
    return [code for kind, code in _FENCE.findall(text) if kind == language]


def run_block(code: str, names: dict[str, Any]) -> str:
    """Runs a block, `await` at its top included; what it printed."""
    compiled = compile(_STEPS.sub("num_steps=2", code), str(GUIDE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = types.FunctionType(compiled, names)()
        if inspect.iscoroutine(found):
            asyncio.run(found)
    return printed.getvalue()


def test_every_python_block_runs(hub: HubServer) -> None:
    pytest.importorskip("torch")
    text = GUIDE.read_text("utf-8")
    names: dict[str, Any] = {"__name__": "guide"}
    printed = [run_block(code, names) for code in blocks(text, "python")]
    assert blocks(text, "text") == [next(out for out in printed if out.startswith("fineweb:"))]
    assert "Batch shape: (4, 128)\n" in "".join(printed)
    assert "Effective batch size: 32\n" in "".join(printed)
    assert "worker-1 was rank 0 of 1\n" in "".join(printed)


def test_the_command_of_the_guide_trains_under_the_name_of_old(hub: HubServer) -> None:
    """A process of its own, with the flags as they are printed and few steps."""
    command = next(code for code in blocks(GUIDE.read_text("utf-8"), "bash") if "--seq-len" in code)
    flags = shlex.split(command.replace("\\\n", " "))[3:]
    done = subprocess.run(
        [sys.executable, "-m", "worker.client", *flags, "--num-steps", "2", "--trainer", "count", "--json"],
        cwd=ROOT / "compat" / "src",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert '"tokens": 16384' in done.stdout and "effective batch size 8" in done.stderr


def test_the_links_of_the_guide_lead_somewhere() -> None:
    for page in (GUIDE, ROOT / "PROJECT.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
