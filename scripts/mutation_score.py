"""Change ten core modules at random, one place at a time, and count the changes that the tests notice.

Usage: python scripts/mutation_score.py [--mutants 200] [--seed 1] [--root .] [--coverage .coverage]

`make coverage` writes what it needs: which test runs which line (contexts of coverage.py), and what each test costs
(pytest's cache). For each mutant the tests that run its line are run, the most specific first (those that run the
fewest branches in all), at most MAX_TESTS and MAX_COST_S; and those of the module's own file, as what a cached function
does is seen in the first test alone. A mutant is killed if one of them fails, if they end the process or do not end.
First all these tests run once on the unchanged source: a test that fails there can judge no mutant.
Kernels of numba are left out: each mutant of one would compile all of them again.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

MODULES = (
    "order/run", "dataset/reader", "dataset/chunks", "scheduler/leases", "scheduler/journal", "fetch/cache",
    "prepare/filters/lines", "prepare/dedup/pairs", "formats/warc", "network/pki/certificates",
)  # fmt: skip
MAX_TESTS, MAX_COST_S, LIMIT_S = 40, 60.0, 400.0
LINES_SHOWN = 20
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
OPERATORS |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift}

_groups = set[int]()  # of processes, one for each pytest that runs


@dataclass(frozen=True)
class Mutant:
    """One change: `[start, stop)` in characters of the module's text becomes `text`."""

    module: str
    line: int
    start: int
    stop: int
    text: str


def mutate(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield ast.UnaryOp(ast.Not(), test)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise():
            yield ast.Pass()


def find_mutants(root: Path, module: str) -> Iterator[Mutant]:
    """Yield every mutant of a module's functions, apart from those of kernels."""
    text = (root / f"src/forebay/{module}.py").read_text()
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def offset(line: int, column: int) -> int:
        whole = text[lines[line - 1] : lines[line]]
        return lines[line - 1] + len(whole.encode()[:column].decode())

    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            continue
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            for result in mutate(node):
                place = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else node
                start = offset(place.lineno, place.col_offset)
                stop = offset(place.end_lineno or place.lineno, place.end_col_offset or 0)
                new = ast.unparse(ast.fix_missing_locations(result))
                yield Mutant(module, place.lineno, start, stop, new if isinstance(result, ast.Pass) else f"({new})")


class Tests:
    """The tests that run a line, the most specific first."""

    def __init__(self, root: Path, coverage: Path) -> None:
        costs = root / ".pytest_cache/v/costs"
        for path in (coverage, costs):
            if not path.is_file():  # SQLite would create it.
                raise FileNotFoundError(f"expected the file {path}: `make coverage` writes it")
        self.costs: dict[str, float] = json.loads(costs.read_text())
        self.sizes = Counter[str]()
        with sqlite3.connect(coverage) as database:
            for context, num_arcs in database.execute(
                "select context, count(*) from context join arc on context_id = context.id group by context"
            ):
                self.sizes[context] = num_arcs
        if not any(context.partition("|")[0] in self.costs for context in self.sizes):
            raise ValueError(f"no test of {coverage} has a cost in {costs}: run `make coverage`, which writes both")
        self.data = CoverageData(str(coverage))
        self.data.read()
        self.lines: dict[str, dict[int, list[str]]] = defaultdict(dict)
        for module in MODULES:
            name = next((file for file in self.data.measured_files() if file.endswith(f"/src/forebay/{module}.py")), "")
            self.lines[module] = self.data.contexts_by_lineno(name) if name else {}

    def select(self, mutant: Mutant) -> list[str]:
        """Return the ids of the tests to run."""
        names = {context.rpartition("|")[2] or context for context in self.lines[mutant.module].get(mutant.line, [])}
        names |= {context.partition("|")[0] for context in self.lines[mutant.module].get(mutant.line, [])}
        names &= self.costs.keys()
        cost_s, selected = 0.0, list[str]()
        for name in sorted(names, key=lambda name: (self.sizes[name], name)):
            if self.costs[name] <= MAX_COST_S / 6 and cost_s < MAX_COST_S and len(selected) < MAX_TESTS:
                selected.append(name)
                cost_s += self.costs[name]
        own = re.compile(rf"tests/unit/(.*/)?test_{mutant.module.rpartition('/')[2]}\.py::")
        return selected + [name for name in self.costs if selected and own.match(name) and name not in selected]


def copy_sources(root: Path, folder: Path) -> Path:
    """Copy `src` to a folder where mutants are run one after the other; kernels are compiled once for each folder."""
    shutil.copytree(root / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    compiled = folder / "src/forebay/prepare/compiled.py"
    compiled.write_text(f"{compiled.read_text()}\n\ndef _hash_of_sources() -> str:\n    return 'mutants'\n")
    return folder


def run_tests(root: Path, folder: Path, limit_s: float | None, *arguments: str) -> tuple[int | None, str]:
    """Return the exit code of pytest on a folder's sources, None after `limit_s`, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *arguments]
    with tempfile.TemporaryDirectory(dir=folder) as temporary, tempfile.TemporaryFile() as output:
        env = os.environ | {"PYTHONPATH": f"{folder}/src", "NUMBA_CACHE_DIR": f"{folder}/kernels", "TMPDIR": temporary}
        process = subprocess.Popen(
            command, cwd=root, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        _groups.add(process.pid)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process.pid)
            process.wait()
            _groups.discard(process.pid)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def kill_group(group: int) -> None:
    """Kill pytest and the processes that its tests started."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run(root: Path, folder: Path, mutant: Mutant, tests: list[str]) -> str:
    """Return "killed", "timed out", "survived" or "not covered"."""
    if not tests:
        return "not covered"
    original, path = (place / f"src/forebay/{mutant.module}.py" for place in (root, folder))
    text = original.read_text()
    path.write_text(text[: mutant.start] + mutant.text + text[mutant.stop :])
    try:
        code, _ = run_tests(root, folder, LIMIT_S, "-x", "-n0", *tests)
    finally:
        shutil.copy2(original, path)  # With its time: what was compiled of the mutant is not taken for it.
    if code is None:
        return "timed out"
    # These tests passed on the unchanged source. 2 and 4: they cannot be imported any more; negative: a signal.
    known = {0: "survived", 1: "killed", 2: "killed", 4: "killed"}
    return "killed" if code < 0 else known.get(code, f"error {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the random changes of core modules that the tests notice.")
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--coverage", type=Path, default=Path(".coverage"), help="relative to --root")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    try:
        if arguments.mutants < 1:
            raise ValueError(f"--mutants: expected at least 1, got {arguments.mutants}")
        tests = Tests(root, root / arguments.coverage)
    except (OSError, ValueError, sqlite3.Error) as error:
        parser.exit(2, f"mutation_score: {error}\n")
    chance, chosen = random.Random(arguments.seed), list[Mutant]()
    for index, module in enumerate(MODULES):
        mutants = sorted(set(find_mutants(root, module)), key=lambda mutant: (mutant.start, mutant.stop, mutant.text))
        num = arguments.mutants * (index + 1) // len(MODULES) - arguments.mutants * index // len(MODULES)
        chosen += chance.sample(mutants, min(num, len(mutants)))
    selected = [tests.select(mutant) for mutant in chosen]
    results: dict[str, Counter[str]] = defaultdict(Counter)
    num_slots = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, ThreadPoolExecutor(num_slots) as pool:
        folders = SimpleQueue[Path]()
        for slot in range(num_slots):
            folders.put(copy_sources(root, Path(temporary, str(slot))))

        def run_one(mutant: Mutant, names: list[str]) -> str:
            folder = folders.get()
            try:
                return run(root, folder, mutant, names)
            finally:
                folders.put(folder)

        if union := sorted({name for names in selected for name in names}):
            code, output = run_tests(root, Path(temporary, "0"), None, f"-n{num_slots}", "--dist=loadgroup", *union)
            if code:
                print("\n".join(output.splitlines()[-LINES_SHOWN:]))
                print("mutation_score: these tests fail on the unchanged source: they can judge no mutant")
                return 1
        try:
            for mutant, result in zip(chosen, pool.map(run_one, chosen, selected)):
                results[mutant.module][result] += 1
                if result != "killed":
                    print(f"{result}: src/forebay/{mutant.module}.py:{mutant.line}: {mutant.text}", flush=True)
        except BaseException:  # Ctrl-C does not reach groups of their own, and the pool waits for them.
            for group in [*_groups]:
                kill_group(group)
            raise
    for module in MODULES:
        results[module]["killed"] += results[module].pop("timed out", 0)
        print(f"{results[module]['killed']:4d} of {results[module].total():3d} killed: {module}")
    killed, num = sum(counts["killed"] for counts in results.values()), len(chosen)
    print(f"mutation score: {killed} of {num}, {killed / num:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
