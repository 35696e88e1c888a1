"""Runs the fenced blocks of a documentation page, in their order, in one directory.

- `python` runs in one namespace per page; `await` at its top level runs under a running event loop, as in a notebook.
- `sh` runs by bash with `-euo pipefail`. A line that ends in `&` is a server: the next one
  waits until it prints `ready`.
- `console`: lines after `$ ` run; their output must match the lines that follow, `…` matching anything.
- `output` must match the output of the block before, `…` matching anything.
- `toml`, `json`, `yaml` are parsed, and written to NAME if the first line begins with `# NAME.`.
- `text` does not run, because it needs a cluster, the internet or another program. A script that begins with `#!` is
  checked by `bash -n`.

Addresses of documentation (`127.0.0.1:7400`, `10.0.0.2:7410`) become free ports of this machine.
"""

import ast
import asyncio
import builtins
import contextlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import types
from dataclasses import dataclass, field
from pathlib import Path

from support.ports import free_port

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
_ADDRESS = re.compile(r"\b(?:127\.0\.0\.1|10\.0\.0\.\d+):\d+\b")
_HOST = re.compile(r"\b10\.0\.0\.\d+\b")
_SERVER = re.compile(r"^(.*\S) &(?: *#.*)?$", re.MULTILINE)
_BASH = """set -euo pipefail
is_up() {
  for ((i = 0; i != $3; i++)); do
    grep -q "^ready\\|^standing by" "$1" && return
    kill -0 "$2" 2>/dev/null || { wait "$2" && return; cat "$1" >&2; return 1; }
    sleep 0.02
  done
}
"""


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    code: str


def pages() -> list[Path]:
    """README and all pages of docs, those of decisions included."""
    return [ROOT / "README.md", ROOT / "compat" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(text.count("\n", 0, result.start()) + 1, result[2].strip(), re.sub(f"(?m)^{result[1]}", "", result[3]))
        for result in _FENCE.finditer(text)
    ]


@dataclass
class Page:
    """A page that is being run.

    Attributes:
        path: The Markdown file.
        directory: Where its blocks run; the current directory of this process.
        names: The namespace of Python blocks.
        replace: Regular expressions and their replacements: placeholders, addresses of the internet.
        environment: Variables for shell blocks, besides this process's own.
        printed: The output of each block.
    """

    path: Path
    directory: Path
    names: dict = field(default_factory=lambda: {"__name__": "page", "__builtins__": builtins})
    replace: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    _ports: dict[str, str] = field(default_factory=dict)
    _sessions: list[int] = field(default_factory=list)

    def assert_runs(self) -> None:
        for block in blocks(self.path):
            location = f"{self.path.relative_to(ROOT)}:{block.line}"
            runner = getattr(self, f"_run_{block.language}", None)
            assert runner is not None, f"{location}: a block of language {block.language!r}; `text` is not run"
            self.printed.append(runner(self.resolve(block.code), location) or "")

    def resolve(self, code: str) -> str:
        """Return `code` with placeholders and addresses replaced."""
        code = _HOST.sub("127.0.0.1", _ADDRESS.sub(lambda result: self.address(result[0]), code))
        for pattern, value in self.replace.items():
            code = re.sub(pattern, value, code)
        return code

    def address(self, documented: str) -> str:
        if documented not in self._ports:
            self._ports[documented] = f"127.0.0.1:{free_port()}"
        return self._ports[documented]

    def close(self) -> None:
        """Kill the servers that shell blocks started."""
        for session in self._sessions:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)

    def shell(self, script: str, location: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a script and return its output; its exit status must be one of `codes`."""
        number = len(self._sessions)
        log = self.directory / f".output-{number}"
        servers = iter(range(1000))

        def background(result):
            output = f".server-{number}-{next(servers)}"
            # Our servers print when they are up, however long a busy machine takes; others get some seconds.
            max_tries = -1 if re.match(r"(\w+=\S+ )*forebay ", result[1]) else 250
            return f"{{ {result[1]}; }} > {output} 2>&1 & is_up {output} $! {max_tries}"

        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", _BASH + _SERVER.sub(background, script)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=self.directory,
                env=os.environ | self.environment, start_new_session=True,
            )  # fmt: skip
        self._sessions.append(process.pid)
        code = process.wait()
        printed = log.read_text("utf-8", "replace")
        assert code in codes, f"{location}: exit status {code}\n{script}\n{printed[-4000:]}"
        return printed

    def _run_sh(self, code, location):
        return self.shell(code, location)

    def _run_console(self, code, location):
        printed = ""
        for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            while command.endswith("\\"):
                line, _, expected = expected.partition("\n")
                command += "\n" + line
            # A command whose output is shown may say that something is wrong.
            output = self.shell(command, location, (0, 1) if expected.strip() else (0,))
            pattern = r"\s+".join(re.escape(word).replace("…", ".*?") for word in expected.split())
            assert re.search(pattern, output, re.DOTALL), f"{location}: expected\n{expected}\ngot\n{output}"
            printed += output
        return printed

    def _run_python(self, code, location):
        line = int(location.rpartition(":")[2])
        compiled = compile("\n" * line + code, str(self.path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            result = types.FunctionType(compiled, self.names)()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        return printed.getvalue()

    def _run_text(self, code, location):
        if code.startswith("#!"):
            checked = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True)
            assert checked.returncode == 0, f"{location}: {checked.stderr}"

    def _run_output(self, code, location):
        printed, expected = self.printed[-1].split(), code.split()
        pattern = r"\s+".join(re.escape(word).replace("…", ".*?") for word in expected)
        assert re.search(pattern, " ".join(printed), re.DOTALL), f"{location}: got {self.printed[-1]}"

    def _run_toml(self, code, location):
        tomllib.loads(code)
        self._keep(code)

    def _run_json(self, code, location):
        json.loads(code)

    def _run_yaml(self, code, location):
        import yaml

        list(yaml.safe_load_all(code))
        self._keep(code)

    def _keep(self, code):
        if named := re.match(r"# ([\w.-]+\.\w+)\b", code):
            (self.directory / named[1]).write_text(code)


def make_commands(folder: Path) -> None:
    """Write the commands that the pages use as scripts that run this interpreter."""
    folder.mkdir()
    for name, module in [("forebay", "forebay"), ("python", ""), ("torchrun", "torch.distributed.run")]:
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {f"-m {module} " if module else ""}"$@"\n')
        script.chmod(0o755)
