"""A mirror that is killed at any moment leaves no partial file under a name, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forebay.dataset.manifest import MANIFEST_FILE
from support.origin_server import OriginServer
from support.token_slices import write_tokens
from support.waiting import until


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_kill_at_any_moment_leaves_no_partial_file_under_a_name(tmp_path: Path, kind: str) -> None:
    source = write_tokens(tmp_path / "source", [3_000_000, 2_000_000, 3_000_000], dtype=np.uint32).path
    full = {path.name: path.read_bytes() for path in source.iterdir()}
    target = tmp_path / "bucket/copy"
    target.mkdir(parents=True)
    url = str(target) if kind == "folder" else "s3://bucket/copy"

    def named() -> dict[str, bytes]:
        return {name: (target / name).read_bytes() for name in full if (target / name).is_file()}

    with OriginServer(source) as origin, OriginServer(tmp_path / "bucket") as bucket:
        command = [sys.executable, "-m", "forebay", "mirror", origin.url, url, "--quiet"]
        environment = os.environ | bucket.s3_environment | {"TMPDIR": str(tmp_path)}
        origin.faults.bytes_per_s = 30e6
        for num_named in (0, 1, 2):
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
            before = origin.bytes_sent.total()
            until(
                lambda process=process, before=before, num_named=num_named: (
                    process.poll() is not None
                    or (
                        origin.bytes_sent.total() >= before + 5_000_000
                        and sum(name.endswith(".safetensors") for name in named()) >= num_named
                    )
                )
            )
            process.send_signal(signal.SIGKILL)
            process.wait()
            found = named()
            assert all(full[name] == data for name, data in found.items())
            assert MANIFEST_FILE not in found or len(found) == len(full)
        origin.reset()
        assert subprocess.run(command, env=environment).returncode == 0
        retained = {name for name in found if name.endswith(".safetensors")}
        assert named() == full and len(retained) >= 2
        assert not any(origin.requests[name] for name in retained)  # A complete slice is not fetched again.
