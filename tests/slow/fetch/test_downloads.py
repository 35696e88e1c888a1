"""Downloads that are killed, and that meet silence.

Chance that remains: a machine that stands still for longer than its slowness says fails the upper limits of the waits.
"""

import random
import signal
import subprocess
import sys
import time

import pytest

from forebay.errors import NetworkError
from forebay.fetch.downloads import download_large_file
from support.big_file import CONTENT, MIB, big_file_server
from support.calibration import scaled
from support.waiting import until

server = big_file_server


def test_killed_at_any_moment_it_goes_on_and_is_never_seen_in_part(server, tmp_path):
    """Each run fetches only what is missing, and a piece for each connection at most."""
    path, kills, chance = tmp_path / "out" / "big", 0, random.Random(1)
    server.faults.bytes_per_s = 5 * MIB
    code = (
        "import sys; from forebay.fetch.downloads import download_large_file\n"
        "download_large_file(sys.argv[1], 'big', sys.argv[2], chunk_size=1 << 17, max_workers=4)"
    )
    while not path.exists():
        child = subprocess.Popen([sys.executable, "-c", code, server.url, str(path)])
        goal = server.bytes_sent["big"] + chance.randrange(MIB // 4, 2 * MIB)
        until(lambda child=child, goal=goal: child.poll() is not None or server.bytes_sent["big"] >= goal)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        assert child.wait() in (0, -signal.SIGKILL)
        assert not path.exists() or path.read_bytes() == CONTENT
    assert kills and [each.name for each in path.parent.iterdir()] == ["big"]
    assert server.bytes_sent["big"] < len(CONTENT) + (kills + 1) * 5 * (1 << 17)


@pytest.mark.parametrize("timeout_s", [0.5, 2.0])
def test_patience_bounds_all_attempts_together(server, tmp_path, timeout_s):
    """Silence at the first answer, and amid the bytes; what came is kept, and the download goes on from there."""
    path = tmp_path / "out" / "big"
    began = time.monotonic()
    download_large_file(server.url, "big", tmp_path / "calibrate")
    work_s = 20 * (time.monotonic() - began)
    server.faults.black_hole = True
    began = time.monotonic()
    with pytest.raises(NetworkError, match=rf"big from {server.url}: no answer after \d+ attempts in \d.*s; the last"):
        download_large_file(server.url, "big", path, timeout_s=timeout_s)
    assert timeout_s / 2 < time.monotonic() - began < scaled(2 * timeout_s) + work_s
    server.faults.black_hole, server.faults.connection_bytes_per_s = False, MIB
    fallen = []

    def fall(received, total):
        if received and not fallen:
            server.faults.black_hole = True
            fallen.append(time.monotonic())

    with pytest.raises(NetworkError, match=r"big: got \d+ of \d+ bytes, then none for .* failed attempts in .*127"):
        download_large_file(
            server.url, "big", path, timeout_s=timeout_s, chunk_size=1 << 16, max_workers=2, on_progress=fall
        )
    assert timeout_s / 2 < time.monotonic() - fallen[0] < scaled(2 * timeout_s) + work_s
    server.faults.black_hole, server.faults.connection_bytes_per_s = False, 0.0
    got = download_large_file(server.url, "big", path, chunk_size=1 << 18)
    assert path.read_bytes() == CONTENT and got.bytes_fetched <= len(CONTENT)
