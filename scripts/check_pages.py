"""Check that the pages of the documentation say what is true: one line per fault, exit status 1 if there is one.

Usage: python scripts/check_pages.py

- Links of README, docs and the other pages lead to files and headings that exist.
- docs is a tree of short pages of four kinds, each listed once in docs/README.md.
- Each item of the seed documents has a line with evidence, each threat a test; every test that a page names exists.
- Targets of `make` and commands of `forebay` with their flags that stand in code exist, and so do modules of benchmarks
  and paths below scripts, tests, benchmarks and examples; a line that says "of commit" is of that commit. On some pages
  other modules and files, too. Not checked: a flag's value, a flag without its command, keys of `--set`, what follows a
  `--`, links by reference.
- Each dependency has a reason; environment variables and keys of API files are in the reference; docstrings of the
  public interface name every argument; the command line stays small; generated tables are those of the code.
"""

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import docs_site
import options

import forebay
import forebay.callbacks
from forebay.cli import make_parser
from forebay.prepare.api import PRESETS, ApiSpec

ROOT = Path(__file__).resolve().parents[1]
DOCS, TESTS, SOURCES = ROOT / "docs", ROOT / "tests", ROOT / "src" / "forebay"
REFERENCE = DOCS / "reference"
INDEX = DOCS / "README.md"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path != INDEX)
OTHERS = ("README.md", "compat/README.md", "PROJECT.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
ALL_PAGES = [*PAGES, INDEX, *(ROOT / name for name in OTHERS)]
MAX_WORDS = 1500
MAX_OPTIONS = 441
KINDS = {"Tutorial": "tutorial", "How-to": "how-to", "Reference": "reference", "Explanation": "explanation"}
SEED_ITEMS = {"S0": 25, "S1": 37, "S2": 35, "S3": 19, "S4": 30}
NAMED_TEST = re.compile(r"`(?:tests/)?((?:unit|slow|contract|sim|docs|e2e)/[\w/]+\.py|test_\w+\.py)(?:::(\w+))?`")
INSTALLATION = ("pip install '.[prepare,network]'", "pip wheel --no-deps --wheel-dir dist .")


command_line = cache(make_parser)


@cache
def read(path: Path) -> str:
    return path.read_text("utf-8")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def check_links() -> Iterator[str]:
    for page in ALL_PAGES:
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?(?:\s[^)]*)?\)", read(page)):
            linked = (page.parent / target) if target else page
            if not linked.exists():
                yield f"{name(page)}: the link {target} leads nowhere"
            elif anchor and linked.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", read(linked), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                if anchor not in anchors:
                    yield f"{name(page)}: {target} has no heading #{anchor}"


def check_tree() -> Iterator[str]:
    for page in PAGES:
        num_words = sum(bool(re.search(r"\w", word)) for word in docs_site.PARTS.sub("", read(page)).split())
        if num_words > MAX_WORDS:
            yield f"{name(page)}: expected at most {MAX_WORDS} words, got {num_words}"
    listed: list[str] = []
    for heading, section in re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", read(INDEX), re.MULTILINE):
        links = re.findall(r"^- \[[^]]+\]\(([^)]+)\): .+\.$", section, re.MULTILINE)
        if len(links) != section.count("]("):
            yield f"docs/README.md: {heading}: expected one line per page"
        for link in links:
            if link.partition("/")[0] != KINDS.get(heading):
                yield f"docs/README.md: {link} is not a page of the kind {heading}"
        listed += links
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES]
    for page in sorted({*pages, *listed}):
        if pages.count(page) != 1 or listed.count(page) != 1:
            yield f"docs/README.md: expected {page} once, got it {listed.count(page)} times"


def check_evidence() -> Iterator[str]:
    text = "".join(map(read, sorted(REFERENCE.glob("seeds-*.md"))))
    for seed, num_items in SEED_ITEMS.items():
        rows = re.findall(rf"^\| {seed}\.(\d+) \| (.+?) \| (.+) \|$", text, re.MULTILINE)
        if [int(number) for number, _, _ in rows] != list(range(1, num_items + 1)):
            yield f"seeds: expected the items {seed}.1 to {seed}.{num_items} in order, one line each"
        for number, _, evidence in rows:
            if not re.search(r"`|as S\d|the same|\]\(", evidence):
                yield f"seeds: {seed}.{number} shows nothing"
    for page in sorted(REFERENCE.glob("threat-model*.md")):
        rows = [line for line in read(page).splitlines() if line.startswith("| ") and "| threat |" not in line]
        for row in rows:
            if "::test_" not in row:
                yield f"{name(page)}: no test shows {row[2:60]}…"


def check_tests() -> Iterator[str]:
    for page in ALL_PAGES:
        for file, function in sorted(set(NAMED_TEST.findall(read(page)))):
            if not (TESTS / file).exists():
                yield f"{name(page)}: there is no tests/{file}"
            elif function and not re.search(
                rf"^\s*(async )?(def|class) {function}\b", read(TESTS / file), re.MULTILINE
            ):
                yield f"{name(page)}: tests/{file} has no {function}"


def read_code(page: Path) -> Iterator[str]:
    """Each line of a page's blocks of code, and each piece of code in its text."""
    text = read(page).replace("\\\n", " ")
    fence = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    for block in fence.findall(text):
        yield from map(str.strip, block.splitlines())
    text = fence.sub("", text)
    yield from re.findall(r"^ {4,}(.+)$", text, re.MULTILINE)
    for piece in re.findall(r"`((?:[^`\n]|\n(?!\n))+)`", text):
        yield " ".join(piece.split())


def check_commands() -> Iterator[str]:
    """A word in capitals or `…` is the reader's."""
    targets = re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), re.MULTILINE)
    for page in ALL_PAGES:
        for line in read_code(page):
            for target in re.findall(r"(?:^|[$;&] )make ([a-z][\w-]*)", line):
                if target not in targets:
                    yield f"{name(page)}: the Makefile has no target {target}"
            for command in re.findall(r"(?<![\w\"'/.-])(?<!-t )(?<!from )forebay ([^|;&<>#()'\"]+)", line):
                if not re.fullmatch(r"[a-z]+ \d+", command):  # the first line of a message that is signed
                    yield from check_command(page, re.split(r" \[?-- ", command)[0].split())
            if line.startswith("python -m ") and page.name.startswith("seeds-"):
                module = line.split()[2]
                if not (module.startswith("worker.") or has_module(module)):
                    yield f"{name(page)}: there is no module {module}"


def has_module(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_command(page: Path, words: list[str]) -> Iterator[str]:
    parser, verbs = command_line(), list[str]()
    while parser._subparsers is not None and words and re.fullmatch(r"[a-z][\w-]*", words[0]):
        verbs.append(words.pop(0))
        choices: dict[str, Any] = parser._subparsers._group_actions[0].choices  # type: ignore[assignment]
        if verbs[-1] not in choices:
            yield f"{name(page)}: there is no command forebay {' '.join(verbs)}"
            return
        parser = choices[verbs[-1]]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for word in words:
        flag = word.strip("[]").partition("=")[0]
        if flag.startswith("--") and flag not in flags:
            yield f"{name(page)}: forebay {' '.join([*verbs, ''])}has no {flag}"


def check_files() -> Iterator[str]:
    for page in (DOCS / "explanation" / "architecture.md", REFERENCE / "dependencies.md"):
        for file in sorted(set(re.findall(r"`([\w-]+/[\w/-]+\.\w+)`", read(page)))):
            if not (ROOT / file).exists() and not (SOURCES / file).exists():
                yield f"{name(page)}: there is no {file}"
    for page in ALL_PAGES:
        for line in read(page).splitlines():
            for file in re.findall(r"(?<![\w/.-])(?:scripts|tests|benchmarks|examples)/[\w./*-]*\w", line):
                if not any(ROOT.glob(file)) and "of commit" not in line:
                    yield f"{name(page)}: there is no {file}"
        for module in sorted(set(re.findall(r"\bbenchmarks(?:\.\w+)+(?=[ `;:,\]])", read(page))) - {"benchmarks.md"}):
            file = ROOT / module.replace(".", "/")
            if not (file.is_dir() or file.with_suffix(".py").exists()):
                yield f"{name(page)}: there is no module {module}"


def check_reference() -> Iterator[str]:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    needed = {*project["dependencies"], *(n for extra in project["optional-dependencies"].values() for n in extra)}
    packages = {re.split(r"[<>=\[;]", package)[0].strip() for package in needed} - {"forebay"}
    rows = re.findall(r"^\| (.+) \|$", read(REFERENCE / "dependencies.md"), re.MULTILINE)
    explained = {package for row in rows for cell in row.split(" | ")[:2] for package in cell.split(", ")}
    for package in sorted(packages - explained):
        yield f"docs/reference/dependencies.md: no reason for {package}"
    variables = {
        variable for path in SOURCES.rglob("*.py") for variable in re.findall(r"\bFOREBAY_[A-Z_]+\b", read(path))
    }
    for variable in sorted(variables - set(re.findall(r"\bFOREBAY_[A-Z_]+\b", read(REFERENCE / "configuration.md")))):
        yield f"docs/reference/configuration.md: no line on {variable}"
    for key in (*(item.name for item in fields(ApiSpec)), *PRESETS):
        if key not in read(DOCS / "how-to" / "apis.md"):
            yield f"docs/how-to/apis.md: no line on {key}"
    for line in INSTALLATION:
        if line not in read(ROOT / "README.md"):
            yield f"README.md: expected the line {line}"


def check_options() -> Iterator[str]:
    """Every option: arguments of commands, keys of recipes, settings, variables."""
    if (count := sum(map(len, options.places().values()))) > MAX_OPTIONS:
        yield f"there are {count} options, expected at most {MAX_OPTIONS}: `python scripts/options.py` counts them"


def public_callables() -> Iterator[tuple[str, Any]]:
    """(name, callable) of what users call."""
    for key in sorted(set(forebay.__all__) - {"__version__", "callbacks"}):
        item = getattr(forebay, key)
        yield key, item
        for member_key, member in vars(item).items() if inspect.isclass(item) else ():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not member_key.startswith("_"):
                yield f"{key}.{member_key}", function
    for key in ("wandb", "tensorboard", "mlflow"):
        yield f"callbacks.{key}", getattr(forebay.callbacks, key)


def check_generated() -> Iterator[str]:
    for page, text in docs_site.filled_pages().items():
        if text != read(page):
            yield f"{name(page)}: its tables are not those of the code: `make pages` writes them again"


def check_docstrings() -> Iterator[str]:
    for key, item in public_callables():
        text = inspect.getdoc(item) or ""
        if not text:
            yield f"{key}: expected a docstring, got none"
        if inspect.isclass(item) and ("Attributes:" in text or issubclass(item, Exception)):
            continue  # Made by Forebay, not by users.
        arguments = [argument for argument in inspect.signature(item).parameters if argument not in ("self", "cls")]
        if len(arguments) > 2 or inspect.isclass(item):
            for argument in arguments:
                if not re.search(rf"\b{argument}\b", text):
                    yield f"{key}: its docstring has no word on {argument}"


CHECKS = (
    check_links, check_tree, check_evidence, check_tests, check_commands, check_files, check_reference,
    check_options, check_generated, check_docstrings,
)  # fmt: skip


def main() -> int:
    sys.path[:0] = [str(ROOT), str(TESTS)]  # of the modules that pages name
    faults = dict.fromkeys(fault for check in CHECKS for fault in check())
    print("\n".join(faults) or f"pages: {len(ALL_PAGES)} pages checked")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
