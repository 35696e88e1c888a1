"""Whole preparations with everything on: the same bytes whatever makes them or befalls them."""

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from forebay.prepare.report import load_report
from support import whole
from support.feeding import small_disk
from support.outputs import hashes

pytest.importorskip("numba")
pytest.importorskip("resiliparse")
Expected = tuple[str, dict[str, str]]  # The dataset id and the hashes of the files.
KILLS = int(os.environ.get("FOREBAY_PREPARE_KILLS", "4"))
PHASES = ("text", "dedup", "tokenizer", "encode", "shuffle", "slice")
NAMED_BY_PATH = (".inputs.json", "report.html", "rejects.jsonl", "contamination.jsonl")
"""These name documents without an id by where they lie."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    whole.make_inputs(folder / "in")
    if importlib.util.find_spec("kenlm") is not None:
        whole.make_model(folder / whole.MODEL)
    return folder


@pytest.fixture(scope="module")
def expected(base: Path) -> Expected:
    """The dataset id and the files that one process makes."""
    result = whole.run(base / "in", base / "one", 1)
    created, report = hashes(base / "one"), load_report(base / "one/report.html")
    assert "manifest.json" in created and "report.html" in created
    *_, decontaminated, deduplicated, _ = report["funnel"]
    hits = (base / "one/contamination.jsonl").read_bytes().splitlines()
    assert decontaminated["dropped"] == {"contaminated_exam": len(hits)} and len(hits) > 10
    assert deduplicated["dropped"].keys() >= {"exact_duplicate", "url_duplicate", "near_duplicate", "mostly_duplicate"}
    assert deduplicated["changed"].keys() >= {"lines cut", "spans of 3 sentences cut", "spans of 20 words cut"}
    return result, created | {".ids": hashes(base)["one.ids"]}


def check(out: Path, result: str, expected: Expected):
    created = hashes(out) | {".ids": hashes(out.parent)[f"{out.name}.ids"]}
    assert {name for name in expected[1] | created if created.get(name) != expected[1].get(name)} == set()
    assert result == expected[0]


def test_another_number_of_processes(base: Path, expected: Expected):
    check(base / "by3", whole.run(base / "in", base / "by3", 3, PYTHONHASHSEED="3"), expected)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray(base: Path, expected: Expected):
    out = base / "ray"
    check(out, whole.run(base / "in", out, 2, "ray", RAY_USAGE_STATS_ENABLED="0"), expected)


def test_another_place_of_the_same_input(base: Path, expected: Expected, tmp_path):
    shutil.copytree(base / "in", tmp_path / "in")
    shutil.copy(base / whole.EXAM, tmp_path)
    if (base / whole.MODEL).exists():
        shutil.copy(base / whole.MODEL, tmp_path)
    result = whole.run(tmp_path / "in", tmp_path / "elsewhere", 1, FOREBAY_CODER="reference")
    created = hashes(tmp_path / "elsewhere")
    assert result == expected[0]
    assert {name for name in created if created[name] != expected[1][name]} <= set(NAMED_BY_PATH)
    for path in (tmp_path / "elsewhere").rglob("[!.]*.json"):
        assert str(tmp_path) not in path.read_text()


def test_workers_that_die(base: Path, expected: Expected):
    out = base / "unlucky"
    done = subprocess.run(
        whole.command(base / "in", out, 2), capture_output=True, text=True,
        env=os.environ | {"WHOLE_UNLUCKY": str(base / "tries")},
    )  # fmt: skip
    assert "died with SIGKILL" in done.stderr and "ran out of memory" in done.stderr
    assert "retried alone with smaller batches (scale 1 of 3)" in done.stderr
    check(out, done.stdout.strip(), expected)


def kill_in(phase: str, command: list[str], how: signal.Signals, rng: random.Random) -> bool:
    """Start it and kill all its processes a moment after it told of that phase; whether it was still running."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    steps = rng.randint(1, 6)
    assert process.stderr is not None and process.stdout is not None
    for line in process.stderr:
        steps -= line.startswith(f"{phase} ")
        if steps <= 0 or line.partition(" ")[0] in PHASES[PHASES.index(phase) + 1 :]:
            break
    time.sleep(rng.random() * 0.05)
    alive = process.poll() is None
    reader = threading.Thread(target=process.stderr.read)  # so that it does not wait for us
    reader.start()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    process.wait()
    reader.join()
    process.stdout.close()
    process.stderr.close()
    whole.wait_for_none(process.pid)
    return alive


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds left-over processes in /proc")
def test_killed_in_every_phase(base: Path, expected: Expected):
    out, rng, kills = base / "killed", random.Random(KILLS), 0
    phases = [*PHASES] * (KILLS // len(PHASES) + 1)
    for number, phase in enumerate(sorted(rng.sample(phases, KILLS), key=PHASES.index)):
        how = signal.SIGINT if number % 3 == 1 else signal.SIGKILL
        kills += kill_in(phase, whole.command(base / "in", out, rng.choice([1, 2])), how, rng)
    assert kills > KILLS // 2, "killed too late to tell"
    check(out, whole.run(base / "in", out, 2), expected)
    assert not (out / ".work").exists()


def test_a_disk_that_is_full_again_and_again(base: Path, expected: Expected, tmp_path):
    reached = []
    with small_disk(tmp_path / "small", 600_000) as disk:
        out = disk / "d"
        for kilobytes in (600, 3000, 3700, 4400, 4800, 5200, 64_000):
            subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", disk], check=True)
            done = subprocess.run(whole.command(base / "in", out, 2), capture_output=True, text=True)
            if done.returncode == 0:
                break
            reported = done.stderr.splitlines()
            assert done.returncode == 1 and "no space left" in reported[-1], done.stderr
            assert "Traceback" not in done.stderr and not (out / "manifest.json").exists()
            reached += [line.partition(" ")[0] for line in reported if line.partition(" ")[0] in PHASES][-1:]
        assert len(set(reached)) >= 3, f"the disk was full only in {set(reached)}"
        check(out, done.stdout.strip(), expected)
