"""Check laws that only the source code shows: one line per fault, exit status 1 if there is one.

Usage: python scripts/check_sources.py

- Files are renamed, and temporary ones named, by `forebay.files` alone, which writes them whole and flushed.
- Threads are started by `forebay.threads` alone, so that none dies unseen.
- The secrets of a URL (`full_url`) are known only to what opens it. Errors, log lines and prints show no argument `url`
  of type `str`, which may have some, but a PrintableUrl.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src" / "forebay"
THREADS = {"threading.Thread", "threading.Timer"}
RENAMES = {"rename", "replace", "renames", "move"}
TEMPORARY = {"mkstemp", "mktemp", "NamedTemporaryFile"}
TEXTS = {"debug", "info", "warning", "error", "exception", "critical", "warn", "print"}
EXEMPT = {
    ("processes.py", "Thread", 1): "sends a signal",
    ("convert.py", "rename", 4): "a directory that is complete and synced takes its name",
    ("formats/bucket_sink.py", "rename", 1): "an output that a killed run moved away gets its name back",
    ("files.py", "replace", 2): "the one writer",
    ("load/prefetch.py", "Thread", 1): "hands its exception to the iterator",
    ("load/shared_memory.py", "mkstemp", 1): "the memory that processes share is never a file that stays",
    ("storage/retry.py", "Thread", 1): "writes log lines, nothing waits for it",
    ("prepare/engines/local.py", "Thread", 1): "ends the process with its parent",
    ("storage/remote_file.py", "Thread", 1): "hands its exception to whoever waits for a block",
    ("threads.py", "Thread", 1): "SupervisedThread itself",
    ("errors.py", "full_url", 5): "PrintableUrl itself",
    ("load/shards.py", "full_url", 1): "opens it",
    ("network/peer_dataset.py", "full_url", 1): "opens it",
    ("prepare/path_lists.py", "full_url", 2): "the root of files that a list names",
    ("prepare/sources.py", "full_url", 1): "hands it to a plug-in, which opens it",
    ("storage/addresses.py", "full_url", 3): "parts of a URL that is opened",
    ("storage/http.py", "full_url", 1): "opens it",
    ("storage/hub.py", "full_url", 3): "opens it",
    ("storage/origins.py", "full_url", 1): "opens it",
    ("storage/store.py", "full_url", 1): "opens it",
}
"""(file, name, number) of calls that are allowed, and why."""


def read_imports(tree: ast.AST) -> dict[str, str]:
    """The full name that each imported name stands for."""
    names = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def find_calls(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and advice of each call, or base of a class, that only one module may have."""
    imports = read_imports(tree)

    def full_name(node: ast.expr) -> str:
        owner, dot, rest = ast.unparse(node).partition(".")
        return imports.get(owner, owner) + dot + rest

    for node in ast.walk(tree):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if full_name(base) in THREADS:
                yield node.lineno, "Thread", "start threads by forebay.threads.SupervisedThread"
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = full_name(node.func).rpartition(".")
        if f"{owner}.{name}" in THREADS:
            yield node.lineno, "Thread", "start threads by forebay.threads.SupervisedThread"
        arguments = [*node.args, *(keyword for keyword in node.keywords if keyword.arg != "tzinfo")]
        # `replace` of a path has one argument, of a string two, of a moment a zone.
        is_path = isinstance(node.func, ast.Attribute) and name in RENAMES and owner != "dataclasses"
        is_path = is_path and (name != "replace" or len(arguments) == 1)
        is_rename = (name in RENAMES and owner in ("os", "shutil")) or is_path
        if is_rename or (owner == "tempfile" and name in TEMPORARY):
            yield node.lineno, name, "write files by forebay.files"


def find_secrets(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and advice of each use of a full URL, and of each text that shows a URL which may have secrets."""
    for node in ast.walk(tree):
        used = node.func if isinstance(node, ast.Call) else node if isinstance(node, ast.Attribute) else tree
        if "full_url" in (getattr(used, "id", ""), getattr(used, "attr", "")):
            yield node.lineno, "full_url", "only what opens a URL has its secrets"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            urls = {
                argument.arg for argument in ast.walk(node.args)
                if isinstance(argument, ast.arg) and f"_{argument.arg}".endswith("_url")
                and argument.annotation is not None and "str" in ast.unparse(argument.annotation).split(" | ")
            }  # fmt: skip
            for name in find_shown(node):
                if name.id in urls:
                    yield name.lineno, name.id, "annotate it PrintableUrl, or show printable_url(url)"


def find_shown(function: ast.AST) -> Iterator[ast.Name]:
    """The names that an error, a log line or a print of a function shows as they are."""
    for node in ast.walk(function):
        is_text = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TEXTS
        if not is_text and not isinstance(node, ast.Raise):
            continue
        formatted = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.FormattedValue)]
        yield from (name for name in (*formatted, *(node.args if is_text else ())) if isinstance(name, ast.Name))


def main() -> int:
    files, found = sorted(SOURCES.rglob("*.py")), defaultdict[tuple[str, str], list[str]](list)
    for path in files:
        tree = ast.parse(path.read_bytes())
        for line, name, advice in (*find_calls(tree), *find_secrets(tree)):
            found[path.relative_to(SOURCES).as_posix(), name].append(f"{path}:{line}: {name}: {advice}")
    allowed = {(file, name): num for file, name, num in EXEMPT}
    faults = [line for key, lines in found.items() if len(lines) > allowed.get(key, 0) for line in lines]
    faults += [
        f"{file} calls {name} {len(found[file, name])} times: EXEMPT says {num}"
        for (file, name), num in allowed.items() if len(found[file, name]) < num
    ]  # fmt: skip
    print("\n".join(faults) or f"sources: {len(files)} files checked")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
