"""Check laws that only the source code shows: one line per fault, exit status 1 if there is one.

Usage: python scripts/check_sources.py

- Files are renamed, and temporary ones named, by `forebay.files` alone, so that every write is atomic and durable.
- Threads are started by `forebay.threads` alone, so that none dies unseen.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src" / "forebay"
RENAMES = {"rename", "replace", "renames", "move"}
TEMPORARY = {"mkstemp", "mktemp", "NamedTemporaryFile"}
EXEMPT = {
    ("convert.py", "rename"): "a directory that is complete and synced takes its name",
    ("files.py", "replace"): "the one writer",
    ("load/prefetch.py", "Thread"): "hands its exception to the iterator",
    ("load/shared_memory.py", "mkstemp"): "the memory that processes share is never a file that stays",
    ("network/retry.py", "Thread"): "writes log lines, nothing waits for it",
    ("prepare/engines/local.py", "Thread"): "ends the process with its parent",
    ("storage/remote_file.py", "Thread"): "hands its exception to whoever waits for a block",
    ("threads.py", "Thread"): "SupervisedThread itself",
}
"""(file, name) of calls that are allowed, each in one place of its file, and why."""


def is_text(call: ast.Call, owner: str) -> bool:
    """Return True if `a.replace(…)` cannot be of a path, which takes one argument."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return owner not in ("os", "shutil") and name == "replace" and (len(call.args) != 1 or bool(call.keywords))


def find_calls(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and advice of each call that only one module may make."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) in ("threading.Thread", "Thread"):
            yield node.lineno, "Thread", "start threads by forebay.threads.SupervisedThread"
        if not isinstance(node.func, ast.Attribute):
            continue
        name, value = node.func.attr, node.func.value
        owner = value.id if isinstance(value, ast.Name) else ""
        is_rename = name in RENAMES and owner != "dataclasses" and not is_text(node, owner)
        if is_rename or (owner == "tempfile" and name in TEMPORARY):
            yield node.lineno, name, "write files by forebay.files"


def main() -> int:
    files, faults, seen = sorted(SOURCES.rglob("*.py")), list[str](), set[tuple[str, str]]()
    for path in files:
        file = path.relative_to(SOURCES).as_posix()
        threads = 0
        for line, name, advice in find_calls(ast.parse(path.read_bytes())):
            threads += name == "Thread"
            seen.add((file, name))
            if (file, name) not in EXEMPT or threads > 1:
                faults.append(f"{path}:{line}: {name}: {advice}")
    faults += [f"{file} calls {name} no more: take it from EXEMPT" for file, name in sorted(EXEMPT.keys() - seen)]
    print("\n".join(faults) or f"sources: {len(files)} files checked")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
