"""What the real libraries write, read by us.

Needs interpreters that have them, one or several: FOREBAY_FORMAT_PEERS=/path/to/python:/path/to/another (pip install
mosaicml-streaming datasets torch zstd).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.formats.conversion import ConvertOptions
from forebay.formats.sources import open_source
from forebay.formats.token_stream import documents
from support.calibration import scaled

PEERS = [one for one in os.environ.get("FOREBAY_FORMAT_PEERS", "").split(os.pathsep) if one]
GOLDEN = Path(__file__).parent.parent / "golden" / "foreign"
PLAIN = json.loads((GOLDEN / "stream.json").read_text())
DOCUMENTS = [one.tolist() for one in np.split(np.array(PLAIN["tokens"]), np.cumsum(PLAIN["lengths"])[:-1])]

pytestmark = pytest.mark.skipif(not PEERS, reason="FOREBAY_FORMAT_PEERS names no interpreter with others' libraries")


def ask(peer: str, *words: str) -> Any:
    script = str(Path(__file__).with_name("formats_peer.py"))
    done = subprocess.run([peer, script, *words], capture_output=True, text=True, timeout=scaled(150))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def theirs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for i, peer in enumerate(PEERS):
            (Path(folder) / str(i)).mkdir()
            ask(peer, "write", str(Path(folder) / str(i)))
        yield Path(folder)


def test_every_document_that_they_wrote_is_read(theirs: Path) -> None:
    result = sorted(path for path in theirs.glob("*/*") if path.is_dir())
    assert result
    for path in result:
        source = open_source(path, ConvertOptions(), "megatron")
        assert [one.tolist() for one in documents(source.parts())] == DOCUMENTS, str(path)
        assert source.num_documents == len(DOCUMENTS)
