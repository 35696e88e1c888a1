"""Check that names in the source say what a thing is.

Usage: python scripts/check_names.py [PATH ...]   (default: src)

Reports names that the code defines (functions, classes, arguments, variables, attributes) and that are on the list
below, with what to use instead. Exceptions must end in Error, as PEP 8 asks.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

BANNED = {
    "ahead": "prefetch, readahead, num_ahead",
    "at": "offset, index, row, time_s: what the number counts",
    "bad": "invalid, corrupt, rejected",
    "begun": "started",
    "ends": "document_ends, stops, offsets",
    "facts": "metadata, fields, properties",
    "found": "the thing itself: files, match, result, entry",
    "give": "release, return, assign",
    "given": "the argument's own name",
    "has": "contains, is_cached, has_NAME",
    "hear": "receive, handle",
    "heard": "received, response",
    "heed": "apply",
    "held": "the thing itself: lease, is_cached, buffered, pending",
    "judge": "check, verify",
    "judged": "checked, verified",
    "reported": "retained, documents, entries",
    "known": "registry, entries, is_known",
    "least": "min_NAME",
    "left": "remaining (beside right it is fine)",
    "let_go": "release",
    "look": "update, inspect, sample",
    "made": "result, output, created",
    "mend": "repair, fix",
    "most": "max_NAME",
    "note": "record, add",
    "one": "the item's own name",
    "place": "path, index, position, slot",
    "room": "capacity, free_bytes",
    "said": "message, request",
    "say": "add_finding, log, format_NAME",
    "see": "verify, check, observe",
    "settle": "resolve, flush, complete",
    "sift": "process",
    "tell": "notify, send, report",
    "there": "exists, present",
    "told": "message, settings, reported",
    "wanted": "expected, requested",
    "where": "location, source",
    "whole": "data, complete, total",
    "why": "reason",
}


def _defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and name of everything that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def _is_exception(node: ast.ClassDef) -> bool:
    bases = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]
    return any(base == "Exception" or base.endswith("Error") for base in bases)


def check(path: Path) -> Iterator[str]:
    """The complaints about one file, in the order of its lines."""
    text = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    complaints = set()
    defined = list(_defined(tree))
    halves = {"left", "_left"} if any(name == "right" for _, name in defined) else set()
    for line, name in defined:
        if name not in halves and (instead := BANNED.get(name.strip("_").lower())):
            complaints.add((line, f"{name}: use {instead}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and _is_exception(node) and not node.name.endswith("Error"):
            complaints.add((node.lineno, f"{node.name}: an exception's name ends in Error"))
    reported = sorted((line, text) for line, text in complaints if "# name: " not in lines[line - 1])
    return (f"{path}:{line}: {text}" for line, text in reported)


def main(arguments: list[str]) -> int:
    files = [
        file
        for path in map(Path, arguments or ["src"])
        for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))
    ]
    complaints = [complaint for file in files for complaint in check(file)]
    print("\n".join(complaints) or f"names: {len(files)} files checked")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
