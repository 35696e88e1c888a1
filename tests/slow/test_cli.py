"""The command line as a process: imports, completion, signals, a full disk, nodes."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cli import make_parser
from forebay.cli.parser import completion
from support.preparing import write_jsonl

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)


def forebay(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run("-m", "forebay", *arguments)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts = (f"Document {i}. " + "mill race " * 40 for i in range(60))
    write_jsonl(folder / "texts.jsonl", texts)
    out = folder / "dataset"
    done = forebay("prepare", folder / "texts.jsonl", "--out", out, "--tokenizer", "bytes", "--slice-bytes", "8KiB")
    assert done.returncode == 0, done.stderr
    return out


def test_the_package_and_its_help_need_no_heavy_import():
    for code, modules in (
        ("import forebay", "numpy pyarrow torch tokenizers libtorrent cryptography"),
        (
            "from forebay.cli import make_parser; make_parser().format_help()",
            "numpy pyarrow torch cryptography libtorrent ssl asyncio orjson tqdm",
        ),
    ):
        done = run("-c", f"import sys; {code}; print(*set({modules.split()}) & set(sys.modules))")
        assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert "prepare" in forebay("--help").stdout and forebay("-V").stdout.startswith("forebay ")


@pytest.mark.parametrize(
    "typed, expected",
    [
        ("sched", "scheduler"),
        ("network jo", "join"),
        ("network join net --ro", "--role"),
        ("worker --cache-b", "--cache-bytes"),
        ("prepare --recipe fineweb-e", "fineweb-edu"),
        ("prepare --recipe=fineweb-e", "fineweb-edu"),
        ("prepare --filter gopher,c", "gopher,c4"),
        ("prepare x --dedup mi", "minhash"),
        ("prepare --engine r", "ray"),
        ("prepare --to arr", "arrow"),
        ("prepare --config pyproject.t", "pyproject.toml"),
        ("prepare --out sr", "src"),
        ("convert a b --to megat", "megatron"),
        ("launch slu", "slurm"),
        ("ledger verify READ", "README.md"),
        ("--log-level w", "warning"),
        ("completion fi", "fish"),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_the_shell_completes(shell, typed, expected):
    assert expected in completed(shell, typed)


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_no_file_is_offered_for_a_number_or_a_name(shell):
    for typed in ("prepare --seed ", "prepare --recipe R", "convert a b --to READ", "worker --listen "):
        assert "README.md" not in completed(shell, typed)


def completed(shell: str, typed: str) -> list[str]:
    """Return what a shell offers for a line."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script, words = completion(make_parser(), shell), " ".join(repr(word) for word in typed.split(" "))
    if shell == "bash":
        words = words.replace("=", "' '=' '")
        script += f"COMP_WORDS=(forebay {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _forebay; "
        script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    else:
        script += f"complete -C 'forebay {typed}'"
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    words_offered = [line.partition("\t")[0].rstrip("/") for line in done.stdout.splitlines()]
    return [word.removeprefix("--recipe=") for word in words_offered]


def test_zsh_takes_the_completion_of_bash():
    script = completion(make_parser(), "zsh")
    assert script == "autoload -U +X bashcompinit && bashcompinit\n" + completion(make_parser(), "bash")


@pytest.mark.parametrize("program, module", [("forebay", "forebay.cli.data"), ("forebay.worker", "numpy")])
@pytest.mark.parametrize("interrupt", ["raise KeyboardInterrupt", "Destroyed(); time.sleep(600)"])
def test_ctrl_c_while_modules_are_imported_ends_with_130(interrupt, program, module):
    """As from an impatient user, or on a machine that is slow to import. Python drops an interrupt in a destructor."""
    code = (
        "import runpy, sys, time\n"
        "class Destroyed:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: {interrupt}\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"runpy.run_module({program!r}, run_name='__main__')\n"
    )
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (130, "forebay: interrupted\n")


def test_ctrl_c_after_the_result_is_no_failure(dataset):
    for _ in range(4):
        command = [sys.executable, "-m", "forebay", "inspect", str(dataset), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert json.loads(process.stdout.readline())["slices"] > 1
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert (process.returncode, errors) in ((0, ""), (130, "forebay: interrupted\n"))


def test_a_signal_that_interrupts_the_wait_for_it_ends_a_node():
    """An event's own lock is taken for a moment in each wait: a handler that takes it would never return."""
    program = """
import os, signal
from forebay.cli.running import stop_event
stop = stop_event()
with stop._cond:
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.wait(30))
"""
    done = run("-c", program)
    assert done.stdout.strip() == "True", done.stderr


def test_control_c_ends_a_worker_after_its_step():
    command = [sys.executable, "-m", "forebay.worker", "--trainer", "count", "--num-steps", "100_000_000"]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while "first batch" not in worker.stderr.readline():
        assert worker.poll() is None
    worker.send_signal(signal.SIGINT)
    _, message = worker.communicate()
    assert worker.returncode == 130 and "stopped: step " in message and message.endswith("interrupted\n")
