"""What a process may use of its machine, whatever its container, launcher and limits."""

import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import machine
from forebay.errors import UsageError
from forebay.load.arguments import rank_of_world, ranks_per_node
from forebay.maps import map_file
from support.origin_server import OriginServer
from support.paths import read_cases
from support.token_slices import write_tokens

V1 = "9:cpu,cpuacct:/x\n8:memory:/x\n0::/|cpu/cpu.cfs_period_us:100000"
GROUPS = [  # The groups of a process, and files of these; cores; bytes of memory, 0 for the machine's.
    ("", 8, 0),
    ("0::/|cpu.max:max 100000|memory.max:max", 8, 0),
    ("0::/|cpu.max:250000 100000", 2, 0),
    ("0::/|cpu.max:20000 100000", 1, 0),
    ("0::/a/b|a/cpu.max:300000 100000|a/b/cpu.max:max 100000", 3, 0),
    ("0::/a|a/memory.max:1048576", 8, 1 << 20),
    (f"{V1}|cpu/cpu.cfs_quota_us:400000|memory/x/memory.limit_in_bytes:4096", 4, 4096),
    (f"{V1}|cpu/cpu.cfs_quota_us:-1|memory/memory.limit_in_bytes:9223372036854771712", 8, 0),
]


@pytest.mark.parametrize("text, cores, memory", GROUPS)
def test_limits_of_a_container_count(tmp_path, monkeypatch, text, cores, memory):
    groups, *files = text.split("|")
    for line in (f"../../../proc/self/cgroup:{groups}", *files):
        name, _, content = line.partition(":")
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert machine.num_cores(tmp_path) == cores
    assert machine.memory_bytes(tmp_path) == (memory or machine.memory_bytes(tmp_path / "none"))


def test_a_user_without_a_home_has_a_cache(tmp_path, monkeypatch):
    def unknown(_):
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "FOREBAY_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert machine.user_cache().is_absolute() and machine.user_cache().name == "forebay"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # It is to be ignored, says the standard.
    assert machine.user_cache().is_absolute()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.user_cache() == tmp_path / "forebay"
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "c"))
    assert machine.user_cache() == tmp_path / "c"


RANKS = read_cases("ranks")["ranks"]


@pytest.mark.parametrize("variables, expected, local", RANKS)
def test_the_rank_is_that_of_the_launcher_that_started_the_process(
    monkeypatch,
    caplog,
    variables,
    expected,
    local,
):
    for name in {pair.partition("=")[0] for row in RANKS for pair in row[0].split()}:
        monkeypatch.delenv(name, raising=False)
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("=", 1))
    assert rank_of_world(None, None) == tuple(expected) and ranks_per_node(expected[1]) == local
    is_told = "SLURM_NTASKS=8" in variables and expected == [0, 1] and "SLURM_STEP_ID=0" not in variables
    assert ("no step of the job started it" in caplog.text) == is_told
    for pair in variables.split():
        monkeypatch.delenv(pair.partition("=")[0])
    for wrong in ("9", "x"):
        monkeypatch.setenv("SLURM_PROCID", wrong)
        with pytest.raises(UsageError, match="SLURM_PROCID"):
            rank_of_world(None, None)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def urls(tmp_path) -> Iterator[dict[str, str | Path]]:
    write_tokens(tmp_path / "data", [400] * 300)
    with OriginServer(tmp_path / "data") as server:
        yield {"local": tmp_path / "data", "cached": server.url, "ram": server.url}


@pytest.mark.parametrize("kind", ["local", "cached", "ram"])
def test_open_files_do_not_grow_with_the_slices(urls, tmp_path, kind):
    options = {
        "local": {},
        "cached": {"cache_dir": tmp_path / "cache"},
        "ram": {"cache": "ram", "cache_bytes": 10 << 20},
    }
    before = descriptors()
    with forebay.Loader(urls[kind], seq_len=20, global_batch_size=256, **options[kind]) as loader:
        counts = [(len(batch.sample_ids), descriptors()) for batch in loader]
    assert sum(count for count, _ in counts) == 6000
    assert max(open_files for _, open_files in counts) < before + 60


def test_a_map_outlives_its_file_and_never_reaches_behind_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 40)
    with path.open("r+b") as file:
        mapped, part, written = map_file(file), map_file(file, 100, 5000), map_file(file, is_writable=True)
        with pytest.raises(OSError, match="expected at least 10001 bytes, got 10000"):
            map_file(file, 10_001)
    path.unlink()
    written[5000] = 77
    assert part[0] == mapped[5000] == 77 and part[1] == 1 and len(mapped) == 10_000
    with pytest.raises(ValueError, match="WRITEABLE"):
        mapped.flags.writeable = True
