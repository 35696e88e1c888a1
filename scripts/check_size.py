"""Check that the code is no larger than its limits, which only fall: lower one where a folder is well below it.

The measure is tokens of code: no comments, docstrings or blank lines, so that neither density nor prose counts.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

LIMITS = {"src/forebay": 575_000, "tests": 430_000, "benchmarks": 48_000}
IGNORED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip


def num_tokens(text: str) -> int:
    """Return the number of tokens of code of a module's text."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    return sum(
        token.type not in IGNORED and not (token.type == tokenize.STRING and token.start in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def main() -> int:
    status = 0
    for folder, limit in LIMITS.items():
        num = sum(num_tokens(path.read_text(encoding="utf-8")) for path in Path(folder).rglob("*.py"))
        print(f"size: {folder} has {num:,} tokens of code, {limit:,} are allowed")
        if num > limit:
            print(f"size: remove {num - limit:,} tokens of code from {folder}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
