"""Swarms of processes on loopback: the origin gives once, its death is survived, a bucket's limit is not met.

`FOREBAY_SWARM_FULL=1` runs 8 members and 64 MiB, as `python -m benchmarks.swarm` does; by default less.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.swarm import make_dataset, run_round

from support.origin_server import OriginServer

_FULL = "FOREBAY_SWARM_FULL" in os.environ
MEMBERS, SLICES, SLICE_BYTES = (8, 64, 1 << 20) if _FULL else (8, 24, 1 << 18)


def test_eight_processes_that_want_everything_take_it_from_the_origin_once(tmp_path: Path) -> None:
    done = run_round(tmp_path, members=MEMBERS, num_slices=SLICES, slice_bytes=SLICE_BYTES)
    assert done.num_verified == MEMBERS and done.failed == 0
    assert done.from_origins == SLICES and done.origin_ratio <= 1.1


def test_the_data_node_is_killed_once_every_slice_is_out_and_all_finish(tmp_path: Path) -> None:
    done = run_round(
        tmp_path, members=3, num_slices=12, slice_bytes=SLICE_BYTES, cap=8 * SLICE_BYTES, kill=True, timeout_s=60.0
    )
    assert done.num_verified == 3 and done.from_origins == 12


def test_a_web_server_that_answers_503_above_a_rate_serves_a_swarm_with_a_request_an_object(tmp_path: Path) -> None:
    make_dataset(tmp_path / "web", 16, 1 << 16)
    (tmp_path / "swarm").mkdir()
    with OriginServer(tmp_path / "web") as server:
        server.faults.requests_per_s = 40.0
        server.faults.retry_after = "1"
        done = run_round(tmp_path / "swarm", members=3, num_slices=16, slice_bytes=1 << 16, origin=server.url)
        asked = sum(count for name, count in server.requests.items() if "slices/" in name)
        server.faults.requests_per_s = 5.0
        names = [str(path.relative_to(tmp_path / "web")) for path in tmp_path.glob("web/slices/*.safetensors")]
        with ThreadPoolExecutor(3) as pool:  # Three readers that each ask for all, once.
            alone = list(pool.map(lambda name: _status(f"{server.url}/{name}"), names * 3))
    assert done.num_verified == 3 and done.from_origins == 16
    assert asked <= 1.25 * 16, server.requests
    assert len(alone) == 3 * 16 and 503 in alone


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
