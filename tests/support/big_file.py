"""An origin of one file, `big`, of a little over 3 MiB."""

import random
from collections.abc import Iterator

import pytest

from support.origin_server import OriginServer

MIB = 1 << 20
CONTENT = random.Random(3).randbytes(3 * MIB + 4321)


@pytest.fixture
def big_file_server(tmp_path) -> Iterator[OriginServer]:
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "big").write_bytes(CONTENT)
    with OriginServer(tmp_path / "origin") as server:
        yield server
