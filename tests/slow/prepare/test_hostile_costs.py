"""Costs of hostile files: time in proportion to their size, and little memory.

CPU times and memory of processes of their own are compared, with a factor of two and more between a pass and a fail.
"""

import subprocess
import sys
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.formats.wikitext import to_text
from support.preparing import read_records, write_jsonl


def cpu_s(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


@pytest.mark.parametrize(
    "part",
    [
        "[[",
        "{{",
        "{|\n",
        "<ref>",
        "<!--",
        "<math>",
        "[http://a ",
        "[[a|",
        "{{a|",
        "{{lang|x|",
        "'",
        "<a ",
        "[[ {{",
        "\n=",
    ],
)
def test_hostile_wikitext_takes_linear_time(part: str):
    def seconds(size, close):
        return cpu_s(lambda: to_text(part * (size // len(part)) + close * (size // 10)))

    for close in ("", "]]", "}}"):
        assert seconds(200_000, close) < 8 * seconds(50_000, close) + 0.5


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_categories_cost_what_is_used_of_them(tmp_path, kind: str):
    words = pa.array([f"w{i:020}" for i in range(400_000)])

    def seconds(column):
        path, batch = tmp_path / f"a.{kind}", pa.record_batch([column], ["text"])
        if kind == "parquet":
            pq.write_table(pa.Table.from_batches([batch]), path)
        else:
            with pa.ipc.new_file(path, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
                for _ in range(50):
                    writer.write_batch(batch)
        return cpu_s(lambda: read_records(path))

    plain = seconds(words.slice(0, 2000))
    categories = pa.DictionaryArray.from_arrays(pa.array(range(2000), pa.int32()), words)
    # A conversion of all categories takes some 0.06 s; one for every 256 rows of Arrow, as it was, are 390.
    assert seconds(categories) < 2 * plain + 1


MEASURE = """
import resource, sys
from support.preparing import read_records
read_records(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = read_records(sys.argv[2])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, repr(found[0].problem))
"""


@pytest.mark.parametrize("value", ["{}", '{"":0}', '"ab"'])
def test_values_that_no_setting_names_take_little_memory(tmp_path, value: str):
    path = tmp_path / "a.jsonl"
    many = ",".join([value] * ((30 << 20) // (len(value) + 1)))
    path.write_text(f'{{"text": "a", "x": [{many}]}}\n')
    argv = [sys.executable, "-c", MEASURE, write_jsonl(tmp_path / "honest.jsonl", ["a"]), path]
    mib, problem = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
    assert int(mib) < 600 and "values in one object" in problem
