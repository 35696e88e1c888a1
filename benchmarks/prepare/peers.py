"""Runs code of peers in the interpreter that FOREBAY_PEERS names (`.venv-peers/bin/python`), with JSON in and out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PEERS = os.environ.get("FOREBAY_PEERS", ".venv-peers/bin/python")
EXTRACTORS = os.environ.get("FOREBAY_EXTRACT_PEERS", ".venv-peers-extract/bin/python")
"""That of `scripts/peers.sh extract`: datatrove pins an old trafilatura."""
NEMO = os.environ.get("FOREBAY_NEMO", ".venv-nemo/bin/python")
"""NeMo Curator's, which pins other versions: `uv pip install "nemo-curator[text_cpu]"`."""


def ask(code: str, request: Any, python: str = PEERS) -> Any:
    """What the code makes of `request`: it leaves it in `answer`. None, with a line on stderr, if it cannot be run."""
    if not Path(python).exists():
        print(
            f"peers left out: expected an interpreter at {python}. See scripts/peers.sh; FOREBAY_PEERS names another.",
            file=sys.stderr,
        )
        return None
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, name)) for name in ("request.json", "answer.json")]
        Path(paths[0]).write_text(json.dumps(request))
        begin = "import json, sys, time, warnings; warnings.filterwarnings('ignore')\n"
        begin += "request = json.load(open(sys.argv[1]))\n"
        end = "\njson.dump(answer, open(sys.argv[2], 'w'))"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        done = subprocess.run(
            [python, "-I", "-c", begin + code + end, *paths],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
        )
        if done.returncode:
            print(f"peers failed: {done.stderr[-800:]}", file=sys.stderr)
            return None
        return json.loads(Path(paths[1]).read_text())
