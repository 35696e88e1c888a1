"""Outputs that leased rows were given are collected once and in order: `collect` of `examples/inference.py`."""

import json
import runpy
from itertools import permutations

import pytest

from support.paths import ROOT

EXAMPLE = ROOT / "examples" / "inference.py"


def test_outputs_are_collected_once_and_in_order_whatever_the_files(tmp_path):
    """A row of two holders, whose outputs differ, has the same one in any order of files; a torn line has none."""
    collect = runpy.run_path(str(EXAMPLE))["collect"]
    lines = [[(4, "e"), (1, "b"), (0, "a")], [(1, "B"), (2, "c")], [(3, "d"), (1, "b")]]
    for number, order in enumerate(permutations(lines)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, rows in zip("xyz", order):
            text = "".join(json.dumps({"sample": sample, "output": output}) + "\n" for sample, output in rows)
            (folder / f"{name}.jsonl").write_text(text + '{"sample": 5, "out')
        assert collect(folder, 5) == ["a", "B", "c", "d", "e"]
        with pytest.raises(SystemExit, match="1 rows have no output, first row 5"):
            collect(folder, 6)
