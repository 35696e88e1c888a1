"""One run of a subject: its process started, its lines read, and what the hub sent meanwhile."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hub.subjects import SEQ_LEN, SUBJECTS
from benchmarks.loading.fleet import ROOT, NotMeasuredError, clean_environment, folder_of_peers
from benchmarks.server_process import ServerProcess

TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Run:
    """`first_s`: from starting the process; `begun`: what its first line says; `done`: its second; the hub's counts up
    to the first batch and to the end."""

    first_s: float
    first_line: dict[str, Any]
    last_line: dict[str, Any]
    sent_first: dict[str, int]
    sent: dict[str, int]


def run(
    name: str,
    hub: ServerProcess,
    folder: Path,
    *,
    delay_s: float = 0.0,
    bytes_per_s: float = 0.0,
    shuffle: int = 0,
    **ask: Any,
) -> Run:
    """Measure.

    Raises:
        NotMeasuredError: If the subject gives no figure.
    """
    hub.limit(delay_s=delay_s, all_bytes_per_s=bytes_per_s)
    group = SUBJECTS[name].group
    python = folder_of_peers() / group / "bin/python" if group else Path(sys.executable)
    if not python.exists():
        raise NotMeasuredError(f"no {python}; run scripts/peers.sh interop")
    tokenizer = hub.folder / "models/gpt2"
    request_json = json.dumps(
        {"subject": name, "tokenizer": str(tokenizer), "shuffle": shuffle, "seq_len": SEQ_LEN, **ask}
    )
    environment = clean_environment(
        HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1",
        HF_HOME=str(folder / "hf-home"),
    )  # fmt: skip
    began = time.perf_counter()
    with (folder / f"{name}.log").open("ab") as log:
        child = subprocess.Popen(
            [str(python), "-m", "benchmarks.hub.child", request_json], cwd=ROOT, env=environment,
            stdout=subprocess.PIPE, stderr=log, bufsize=0,
        )  # fmt: skip
    try:
        first_line = _line(child, name, folder)
        first_s, sent_first = time.perf_counter() - began, hub.sent()
        last_line = _line(child, name, folder)
        return Run(first_s, first_line, last_line, sent_first, hub.sent())
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _line(child: subprocess.Popen[bytes], name: str, folder: Path) -> dict[str, Any]:
    assert child.stdout is not None
    if not select.select([child.stdout], [], [], TIMEOUT_S)[0]:
        raise NotMeasuredError(f"no batch in {TIMEOUT_S:.0f} s")
    line = child.stdout.readline()
    if not line:
        last = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise NotMeasuredError(f"its process ended: {''.join(last)[:160]}")
    answer: dict[str, Any] = json.loads(line)
    return answer
