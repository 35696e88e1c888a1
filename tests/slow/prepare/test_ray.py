"""A Ray cluster of this machine does what the local engine does, deaths included."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray")

TASKS = """
import os, signal
from dataclasses import dataclass
from forebay.errors import DatasetError

@dataclass(frozen=True)
class Piece:
    number: int
    label: str = "warc/x.gz"

def square(piece, scale):
    return piece.number ** 2

def unlucky(piece, scale):
    if piece.number == 3 and scale < 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if piece.number == 4 and scale < 2:
        raise MemoryError("no room")
    return scale

def fail(piece, scale):
    raise DatasetError(f"line {piece.number} is not JSON.")

def doom(piece, scale):
    os._exit(3)
"""

SCRIPT = """
import json, sys
from pathlib import Path
import ray
import ray_tasks as tasks
from forebay.errors import DatasetError, PrepareError
from forebay.prepare.engines.local import LocalEngine
from forebay.prepare.engines.ray import RayEngine
from forebay.storage.store import open_store

def collect(engine, run, n):
    found = {}
    engine.map(run, [tasks.Piece(i) for i in range(n)], found.__setitem__)
    return [found[i] for i in range(n)]

def late(**options):
    raise Exception("The current node timed out during startup.")

def never_started():
    ray.init, said = late, []
    with RayEngine(2, on_message=said.append) as engine:
        try:
            collect(engine, tasks.square, 1)
        except PrepareError as error:
            return [*said, str(error)]

if __name__ == "__main__":
    said, facts, starts = [], {}, [late, ray.init, ray.init]
    ray.init = lambda **options: starts.pop(0)(**options)
    with RayEngine(2, store=open_store(Path(sys.argv[1]) / "out"), on_message=said.append) as engine:
        facts["squares"] = collect(engine, tasks.square, 50)
        facts["started_again"], said[:] = list(said), []
        with_cpus, ray.cluster_resources = ray.cluster_resources, lambda: {}
        facts["no_cpus"], said[:] = [collect(engine, tasks.square, 3), *said], []
        ray.cluster_resources = with_cpus
        facts["unlucky"] = collect(engine, tasks.unlucky, 6)
        facts["unlucky_said"] = sorted(said)
        try:
            collect(engine, tasks.fail, 1)
        except DatasetError as error:
            facts["error"] = [type(error).__name__, str(error)]
        try:
            collect(engine, tasks.doom, 1)
        except PrepareError as error:
            facts["doom"] = str(error)
    facts["never_started"] = never_started()
    with LocalEngine(2) as engine:
        facts["local"] = collect(engine, tasks.square, 50)
    facts["left"] = sorted(path.name for path in (Path(sys.argv[1]) / "out").iterdir())
    print(json.dumps(facts))
"""


def run_script(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Ray warns of things of its own, and warnings are errors here."""
    (folder / "ray_tasks.py").write_text(textwrap.dedent(TASKS))
    (folder / "script.py").write_text(script)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONWARNINGS": "ignore",
    }
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(folder / "script.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_a_local_cluster_does_what_the_local_engine_does(tmp_path):
    ended = run_script(tmp_path, SCRIPT)
    assert ended.returncode == 0, ended.stderr[-3000:]
    fields = json.loads(ended.stdout.splitlines()[-1])
    assert fields["squares"] == fields["local"] == [i * i for i in range(50)]
    assert fields["unlucky"] == [0, 0, 0, 1, 2, 0]
    assert [text.split(":")[0] for text in fields["unlucky_said"]] == [
        *["task 3 (warc/x.gz) died with its worker"] * 3,
        "task 4 (warc/x.gz) ran out of memory",
        "task 4 (warc/x.gz) ran out of memory",
    ]
    assert fields["error"] == ["DatasetError", "line 0 is not JSON."]
    assert fields["doom"].startswith("task 0 (warc/x.gz) died with its worker")
    assert fields["left"] == []
    again = "engine ray: a cluster of this machine did not start: The current node timed out during startup. "
    assert fields["started_again"][0] == f"{again}It is started again."  # A busy machine may make the second late, too.
    no_cpus = "engine ray: the cluster has no CPUs. The tasks wait for a machine to join it."
    assert fields["no_cpus"][:2] == [[0, 1, 4], no_cpus]
    *attempts, error = fields["never_started"]
    assert len(attempts) == 2 and error.startswith(again.replace("did not start", "cannot be reached or started"))
