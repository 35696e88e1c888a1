"""Runs a notebook in a plain interpreter, as its kernel would: `python -m support.notebooks FILE`.

The value of a cell's last expression is shown as HTML where it can, which is all of a front end that the code uses.
"""

import ast
import json
import sys
from pathlib import Path


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> None:
    names = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path)):
        tree = ast.parse("".join(cell["source"]), f"{path.name}[{number}]")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}[{number}]", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"{path.name}[{number}]", "eval"), names)
            print(getattr(value, "_repr_html_", lambda value=value: repr(value))())


if __name__ == "__main__":
    run(Path(sys.argv[1]))
