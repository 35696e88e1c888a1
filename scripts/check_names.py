"""Check that names and texts say what a thing is, in the field's own terms.

Usage: python scripts/check_names.py [PATH ...]   (default: src docs README.md)

Reports, with what to use instead:
- names that the code defines (functions, classes, arguments, variables, attributes) and that are on the list below;
- exceptions whose names do not end in Error;
- two public classes of one name in the package (`src`);
- command line options, and words in string literals, docstrings and documents, that are on the lists below.

A line that ends in `# name: REASON` is exempt.
"""

import ast
import re
import sys
from collections import defaultdict
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
    "kept": "retained, documents, entries",
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
OPTIONS = {
    "--ahead": "--prefetch-NAME",
    "--at": "--scheduler, --issuer",
    "--keep-ids": "--write-ids",
    "--lifeline": "FOREBAY_EXIT_ON_STDIN_CLOSE",
    "--max-bad": "--max-error-rate",
    "--mend": "--repair",
    "--network": "--identity",
    "--tell": "--notify",
    "--token-file": "--token",
    "forebay adopt": "forebay import",
    "forebay coordinate": "forebay coordinator",
    "forebay probe": "forebay status",
    "forebay schedule": "forebay scheduler, forebay job",
    "forebay work": "forebay worker",
}
WORDS = {
    r"anew": "again, from the start",
    r"heed\w*": "apply",
    r"is away|are away": "unreachable",
    r"judge[ds]?": "checked, verified",
    r"lies there|stands there": "the file, the existing data",
    r"mend\w*": "fix, repair",
    r"nobody|whoever": "name the part: no peer, the caller",
    r"no such door|doors?": "endpoint",
    r"passed over": "skipped",
}
_WORDS = re.compile("|".join(rf"(?P<w{i}>\b(?:{pattern})\b)" for i, pattern in enumerate(WORDS)), re.IGNORECASE)
_OPTIONS = re.compile(rf"(?<![\w-])(?:{'|'.join(OPTIONS)})(?![\w-])")
_INSTEAD = list(WORDS.values())
_FENCE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


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


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and text of every string literal, docstrings included; each line of it by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for number, line in enumerate(node.value.split("\n")):
                yield node.lineno + number, line


def _check_options(line: int, text: str) -> Iterator[tuple[int, str]]:
    for match in _OPTIONS.finditer(text):
        yield line, f"{match[0]}: use {OPTIONS[match[0]]}"


def _check_words(line: int, text: str) -> Iterator[tuple[int, str]]:
    for match in _WORDS.finditer(text):
        yield line, f"{match[0]!r}: use {_INSTEAD[int((match.lastgroup or 'w0')[1:])]}"


def _check_code(text: str, classes: dict[str, list[int]]) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    defined = list(_defined(tree))
    halves = {"left", "_left"} if any(name == "right" for _, name in defined) else set()
    for line, name in defined:
        if name not in halves and (instead := BANNED.get(name.strip("_").lower())):
            yield line, f"{name}: use {instead}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(node.lineno)
            if _is_exception(node) and not node.name.endswith("Error"):
                yield node.lineno, f"{node.name}: an exception's name ends in Error"
    for line, literal in _texts(tree):
        yield from _check_options(line, literal)
        yield from _check_words(line, literal)


def check(path: Path, classes: dict[str, list[int]]) -> Iterator[str]:
    """The complaints about one file, in the order of its lines; adds its public classes with their lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        complaints = set(_check_code(text, classes))
    else:
        prose = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
        words = {item for number, line in enumerate(prose.split("\n"), 1) for item in _check_words(number, line)}
        options = {item for number, line in enumerate(text.split("\n"), 1) for item in _check_options(number, line)}
        complaints = words | options
    lines_of = text.splitlines()
    for line, complaint in sorted(complaints):
        if "# name: " not in (lines_of[line - 1] if line <= len(lines_of) else ""):
            yield f"{path}:{line}: {complaint}"


def main(arguments: list[str]) -> int:
    roots = [Path(argument) for argument in arguments or ["src", "docs", "README.md"]]
    if missing := [str(root) for root in roots if not root.exists()]:
        print(f"names: expected files or folders, got {', '.join(missing)}", file=sys.stderr)
        return 2
    files = [
        file
        for root in roots
        for file in ([root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in (".py", ".md")))
    ]
    complaints: list[str] = []
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        of_file: dict[str, list[int]] = {}
        complaints += check(file, of_file)
        for name, lines in of_file.items() if "src" in file.parts else ():
            classes[name] += [f"{file}:{line}" for line in lines]
    for name, locations in sorted(classes.items()):
        if len(locations) > 1:
            complaints.append(f"{locations[0]}: class {name} is also defined at {', '.join(locations[1:])}")
    print("\n".join(complaints) or f"names: {len(files)} files checked")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
