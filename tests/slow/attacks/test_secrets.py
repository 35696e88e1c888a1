"""The processes that a command starts have no secret of its URL in their command lines."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from support.answers import serve
from support.preparing import write_jsonl
from support.token_slices import write_tokens

PREPARE = """
from forebay.prepare.driver import prepare_dataset
prepare_dataset(url.replace("/d", "/a.jsonl"), "output", tokenizer="bytes", document_ids=True, workers=2)
"""
LOAD = """
import forebay
print(len(list(forebay.Loader(url, seq_len=8, batch_size=4).iterate(num_workers=2))))
"""


@pytest.mark.parametrize("program", [PREPARE, LOAD])
def test_no_process_shows_a_secret(program, tmp_path):
    write_tokens(tmp_path / "d", [10_000] * 3)
    write_jsonl(tmp_path / "a.jsonl", [f"line {n} of a text, said the hare to the hedgehog" for n in range(20_000)])

    def answer(path, headers):
        file = tmp_path / path.partition("?")[0].lstrip("/")
        return (200, {}, file.read_bytes(), None) if file.is_file() else (404, {}, b"", None)

    with serve(answer) as address:
        url = address.replace("//", "//CANARYUSER:CANARYPASS@") + "/d?signature=CANARYSIG"
        command = [sys.executable, "-c", f"url = input()\n{program}"]
        with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdin.write(f"{url}\n".encode())
            process.stdin.close()
            lines = set()
            while process.poll() is None:
                for path in Path("/proc").glob("[0-9]*/cmdline"):
                    with suppress(OSError):
                        lines.add(path.read_bytes())
            assert process.returncode == 0, process.stderr.read()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"multiprocessing" in line or b"forebay" in line for line in lines)
    assert not [text for text in (*lines, *files) if b"CANARY" in text]
