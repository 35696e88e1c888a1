"""Check that the code is no larger than its limits, and that a limit falls where the code does.

The measure is tokens of code: no comments, docstrings or blank lines, so that neither density nor prose counts. A
string is one token, whatever it has inside and whichever Python reads it.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"src/forebay": 575_000, "tests": 430_000, "benchmarks": 48_000}
IGNORED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip
LEAST_SHARE = 0.95  # of a limit that is used: below it the limit is too high
# Since Python 3.12 a formatted string comes in parts.
STRING_START, STRING_END = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)


def num_tokens(text: str) -> int:
    """Return the number of tokens of code of a module's text."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    num = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth -= token.type == STRING_END
        is_docstring = token.type == tokenize.STRING and token.start in docstrings
        num += depth == 0 and token.type not in IGNORED and token.type != STRING_START and not is_docstring
        depth += token.type == STRING_START
    return num


def main() -> int:
    status = 0
    for folder, limit in LIMITS.items():
        num = sum(num_tokens(path.read_text(encoding="utf-8")) for path in (ROOT / folder).rglob("*.py"))
        print(f"size: {folder} has {num:,} tokens of code, {limit:,} are allowed")
        if num > limit:
            print(f"size: remove {num - limit:,} tokens of code from {folder}", file=sys.stderr)
            status = 1
        elif num < LEAST_SHARE * limit:
            print(f"size: lower the limit of {folder} in {__file__}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
