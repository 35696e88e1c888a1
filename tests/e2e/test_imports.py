"""What one batch loads of the package: the core, and none of the wings."""

import subprocess
import sys

import pytest

from support.feeding import make_dataset
from support.origin_server import OriginServer

_ONE_BATCH = """
import sys, forebay
next(iter(forebay.Loader(sys.argv[1], seq_len=8, batch_size=2, cache_dir=sys.argv[2] or None)))
names = [name for name, module in sys.modules.items() if name.split(".")[0] == "forebay"]
print(len(names), *sorted({name.split(".")[1] for name in names if "." in name}))
"""


@pytest.mark.parametrize(("source", "has_cache", "limit"), [("here", 0, 60), ("here", 1, 60), ("http", 1, 75)])
def test_one_batch_loads_few_files_and_no_wing(tmp_path, source, has_cache, limit):
    make_dataset(tmp_path / "origin/here", 1, 4, 8)
    with OriginServer(tmp_path / "origin") as server:
        path = f"{server.url}/here" if source == "http" else str(tmp_path / "origin/here")
        command = [sys.executable, "-c", _ONE_BATCH, path, str(tmp_path / "cache") * has_cache]
        num, *rooms = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert int(num) <= limit
    assert {"fetch", "load", "storage"} <= set(rooms) and not {"lease", "network", "prepare", "scheduler"} & set(rooms)
