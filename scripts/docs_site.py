"""Build the documentation site: `docs_site.py OUT`. It prepares the pages in a temporary directory and runs MkDocs.

`docs_site.py --pages` writes the tables of the pages in docs/ again; `make lint` fails while they are not the code's.

- The navigation is the index, docs/README.md: a page is listed once.
- A file outside docs/ that a page links to becomes a page of the site, so that no link leaves it.
- Between `<!-- generated: NAME -->` and `<!-- end: NAME -->` stands what the code says: `commands`, the parser's
  commands, `recipe`, `convert` and `worker`, the fields of these settings, `options`, all of them with their needs,
  `routes`, the servers' routes and messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import operator
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_WORKER = re.compile(
    r'https://[^"]+/iframe-worker/shim'
)  # The plugin `offline` loads it; docs/site.js takes its place.
OUTSIDE = "repository"  # The folder of the site that has files from outside docs/.
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
_PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "PROJECT.md", "SECURITY.md")
PARTS = re.compile(r"^<!-- generated: (\w+) -->\n(?:.*?^<!-- end: \1 -->\n)?", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("out", type=Path, nargs="?", help="the directory of the site")
    arguments.add_argument("--pages", action="store_true", help="write the tables of the pages in docs/ instead")
    options = arguments.parse_args()
    if options.pages or options.out is None:
        for path, text in filled_pages().items():
            path.write_text(text, "utf-8")
        return 0
    out = options.out.resolve()
    with tempfile.TemporaryDirectory(prefix="forebay-docs-") as directory:
        prepare(Path(directory))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(out)]
        code = subprocess.run(command, cwd=directory, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode
    for page in out.rglob("*.html"):
        text = page.read_text("utf-8").replace('role="dialog"', 'role="dialog" aria-label="Search"')
        depth = len(page.relative_to(out).parts) - 1
        page.write_text(_WORKER.sub(f"{'../' * depth}site.js", text), "utf-8")
    return code


def prepare(directory: Path) -> None:
    """Write mkdocs.yml and the pages into a directory."""
    pages = directory / "docs"
    shutil.copytree(ROOT / "docs", pages)
    waiting = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    waiting += [name for name in _PROJECT if (ROOT / name).exists()]
    done = set(waiting)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text("utf-8")
        if path.endswith(".md"):
            linked = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in _LINK.findall(text)}
            new = {name for name in linked - done if not name.startswith("docs/") and (ROOT / name).is_file()}
            waiting += new
            done |= new
            text = _with_links(text, path)
        page = pages / _site_uri(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_as_page(path, text), "utf-8")
    config = (
        (ROOT / "mkdocs.yml").read_text("utf-8").replace("paths: [src]", f"paths: [{json.dumps(str(ROOT / 'src'))}]")
    )
    (directory / "mkdocs.yml").write_text(f"{config}nav: {json.dumps(navigation())}\n", "utf-8")


def navigation() -> list[Any]:
    """The index as MkDocs wants it."""
    nav: list[Any] = [{"Home": "README.md"}]
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for line in index.splitlines():
        if line.startswith("## "):
            pages: list[Any] = []
            nav.append({line[3:]: pages})
        elif line.startswith("### "):
            pages = []
            next(iter(nav[-1].values())).append({line[4:]: pages})
        elif match := re.match(r"- \[([^]]+)\]\(([^)]+)\)", line):
            pages.append({match[1]: match[2]})
    project = [{name.removesuffix(".md").capitalize(): _site_uri(name)} for name in _PROJECT if (ROOT / name).exists()]
    return [*nav, {"Project": project}]


def _site_uri(path: str) -> str:
    """The place in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"


def _as_page(path: str, text: str) -> str:
    if path.startswith("docs/"):
        return text
    if path.endswith(".md"):
        # Python-Markdown nests a list at four spaces, GitHub at two.
        return re.sub(r"^(?:  )+(?=- |\S)", lambda match: match[0] * 2, text, flags=re.MULTILINE)
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n~~~~ {{.{language} linenums=1}}\n{text}\n~~~~\n"


def filled_pages() -> dict[Path, str]:
    """Return the pages that have generated parts, with those parts as the code has them now."""

    def generated(match: re.Match[str]) -> str:
        lines = "\n".join(GENERATED[match[1]]())
        return f"<!-- generated: {match[1]} -->\n\n{lines.strip()}\n\n<!-- end: {match[1]} -->\n"

    pages = {path: path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))}
    return {path: PARTS.sub(generated, text) for path, text in pages.items() if PARTS.search(text)}


def _with_links(text: str, path: str) -> str:
    """Lead links out of docs/ to the pages that these files have in the site; links to directories, to the index."""

    def resolve(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if (ROOT / target).is_dir():
            target = "docs/README.md"
        return posixpath.relpath(_site_uri(target), posixpath.dirname(_site_uri(path)) or ".")

    return _LINK.sub(resolve, text)


def _cell(text: object) -> str:
    """Text for a cell of a table; between backquotes it is code, and stays as it is."""
    parts = " ".join(str(text).split()).replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"[*\[]", r"\\\g<0>", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def commands() -> Iterator[str]:
    """Every command with its usage, arguments and options, of the parser itself."""
    os.environ["COLUMNS"] = "100"
    for variable in [name for name in os.environ if name.startswith("FOREBAY_")]:
        del os.environ[variable]  # They are defaults of options.
    from forebay.cli import make_parser
    from forebay.cli.parser import PANELS, walk

    root = make_parser()
    by_path = dict(walk(root))
    common = {flag for action in root._actions for flag in action.option_strings}
    yield from ("## Options of every command", "", *_options(root, set()))
    for panel, names in PANELS.items():
        yield f"## {panel}\n"
        for path, parser in by_path.items():
            if path and path[0] in names:
                yield f"### forebay {' '.join(path)}\n"
                yield f"{_sentence(parser.description)}\n"
                usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
                usage = re.sub(r" \[(-h|-q|-v|--json|--log-level [^]]*|--log-format [^]]*)\]", "", usage)
                yield f"```text\n{_wrap(usage)}\n```\n"
                yield from _options(parser, common)


def _sentence(text: str | None) -> str:
    text = (text or "").strip()
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "." if text else ""


def _wrap(usage: str, width: int = 96) -> str:
    """A usage line in lines: a break comes between arguments, not inside one."""
    lines = [""]
    for word in re.findall(r"\[[^]]*(?:\[[^]]*\][^]]*)*\](?: \.\.\.)?|\S+", usage):
        if len(lines[-1]) + len(word) >= width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _options(parser: argparse.ArgumentParser, without: set[str]) -> Iterator[str]:
    rows = []
    formatter = parser._get_formatter()
    for action in parser._actions:
        flags = action.option_strings
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS or "-h" in flags:
            continue
        if flags and set(flags) <= without and "--json" not in flags:
            continue
        if flags == ["--json"] and without and action.nargs == 0:
            continue
        name = formatter._format_args(action, action.dest) if action.nargs != 0 else ""
        if not flags:
            named = f"`{action.metavar or action.dest}`"
        else:
            named = ", ".join(f"`{flag}`" for flag in flags) + (f" `{name}`" if name else "")
        rows.append(f"| {named.replace('|', chr(92) + '|')} | {_cell(formatter._expand_help(action))} |")
    if rows:
        yield "| argument | meaning |\n|---|---|"
        yield from rows
        yield ""


def recipe() -> Iterator[str]:
    """The tables of a recipe, with their settings, types and defaults, of the classes themselves."""
    from forebay.prepare.recipe import STAGES, Recipe
    from forebay.prepare.scores.base import SCORERS

    types = typing.get_type_hints(Recipe)
    tables = {item.name: kind for item in dataclasses.fields(Recipe) if (kind := _table_of(types[item.name]))}
    yield from ("### Settings without a table", "", *_fields(Recipe, without=("stages", *tables)))
    named = [*STAGES.items(), *((f'score.NAME] use = "{name}"', place) for name, place in SCORERS.items())]
    stages = {
        name: operator.attrgetter(place.split(":")[1])(import_module(place.split(":")[0])) for name, place in named
    }
    for name, kind in (tables | stages).items():
        yield f"### \\[{name}{'' if ']' in name else ']'}\n"
        described = re.sub(r"^(The )?`\[[\w.]+\]`( table of a recipe)?: ?", "", _described(kind.__doc__ or "")[0])
        yield f"{_sentence(described)}\n"
        yield from _fields(kind, without=("own",))


def convert() -> Iterator[str]:
    from forebay.formats.conversion import ConvertOptions

    yield from _fields(
        ConvertOptions, without=("dtype", "seq_len", "slice_bytes", "name", "on_progress", "on_skipped", "sink")
    )


def worker() -> Iterator[str]:
    from forebay.worker.config import WorkerConfig

    yield from _fields(WorkerConfig)


def all_options() -> Iterator[str]:
    """Every option, what it does and what it serves."""
    import options

    classes = options.classes()
    rows = PARTS.sub("", (ROOT / "docs/reference/configuration.md").read_text("utf-8")).splitlines()
    cells = {
        row.split(" | ")[0].strip("| `"): row.split(" | ")[-1].strip("| ") for row in rows if row.startswith("| `")
    }
    for place, needs in options.served().items():
        yield f"## {place.replace('[', chr(92) + '[')}\n"
        yield "| option | meaning | serves |\n|---|---|---|"
        texts = dict(options.places()[place])
        kind = classes.get(place)
        for cls in reversed(kind.__mro__) if kind else ():
            texts |= _described(cls.__doc__ or "")[1]
        if place == "Loader":
            texts |= _described(import_module("forebay.load.loader").Loader.__doc__ or "")[1]
        for name, need in needs.items():
            meaning = texts[name] or next((cell for names, cell in cells.items() if name in names), "")
            yield f"| `{name}` | {_cell(meaning)} | {need} |"
        yield ""


def routes() -> Iterator[str]:
    """The routes of each server and the fields of their messages, as `/openapi.json` of a running one has them."""
    from forebay.coordinator.server import Coordinator
    from forebay.scheduler.server import SchedulerService
    from forebay.swarm.share import _make_app

    apps = {
        "Data node": _make_app("Forebay data node", SimpleNamespace(metrics=list)),
        "Scheduler": object.__new__(SchedulerService)._app(),
        "Coordinator": object.__new__(Coordinator)._app(),
    }
    schemas: dict[str, Any] = {}
    for name, app in apps.items():
        document = app.openapi()
        schemas |= document.get("components", {}).get("schemas", {})
        yield f"## {name}\n\n| route | role | request, response | meaning |\n|---|---|---|---|"
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                parts = [operation.get("requestBody", {}), operation["responses"].get("200", {})]
                bodies = [_schema(part.get("content", {}).get("application/json", {}).get("schema")) for part in parts]
                messages = ", ".join(body for body in bodies if body)
                role = operation.get("x-role", "")
                yield f"| `{method.upper()} {path}` | {role} | {messages} | {_cell(operation.get('summary', ''))} |"
        yield ""
    yield "## Messages\n"
    for name, schema in sorted(schemas.items()):
        described, texts = _described(schema.get("description", ""))
        fields = schema.get("properties", {})
        yield f"### {name}\n\n{_cell(described)}\n"
        if fields:
            yield f"| field | type |{' meaning |' if texts else ''}\n|---|---|{'---|' if texts else ''}"
        for field, kind in fields.items():
            needed = "" if field in schema.get("required", ()) else ", optional"
            yield f"| `{field}` | {_schema(kind)}{needed} |" + (f" {_cell(texts.get(field, ''))} |" if texts else "")
        yield ""


def _schema(schema: Any) -> str:
    """A type of JSON in words: with a link to the message that it is."""
    if not schema:
        return ""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    kinds = [text for part in schema.get("anyOf", schema.get("prefixItems", ())) if (text := _schema(part)) != "null"]
    if kinds:
        return f"\\[{', '.join(kinds)}]" if "prefixItems" in schema else " or ".join(kinds)
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_schema(schema['additionalProperties']) or 'any'}"
    if schema.get("type") == "array":
        return f"list of {_schema(schema.get('items')) or 'any'}"
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    bounds = [f"{sign} {_number(schema[name])}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([schema.get("type", "any"), *([f"({', '.join(bounds)})"] if bounds else [])])


def _number(value: float) -> str:
    return "2^62" if value == 2**62 else f"{value:g}" if value < 1e6 else f"{int(value):,}"


_BOUNDS = {"minimum": "≥", "maximum": "≤", "maxLength": "at most", "maxItems": "at most"}
GENERATED = {
    "commands": commands,
    "recipe": recipe,
    "convert": convert,
    "worker": worker,
    "options": all_options,
    "routes": routes,
}


def _table_of(hint: Any) -> Any:
    return next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring, and what it says of each argument or attribute."""
    docstring = f"{inspect.cleandoc(docstring)}\n"
    text = re.split(r"\n\n?(?:Source|Args|Attributes|Returns|Yields|Raises): ?", docstring)[0]
    sections = re.findall(r"^(?:Args|Attributes):.*\n((?:(?: {4}.*)?\n)+)", docstring, re.MULTILINE)
    items = re.findall(r"^ {4}([\w*]+(?:, [\w*]+)*): (.+\n(?: {8}.*\n)*)", "".join(sections), re.MULTILINE)
    return text.strip(), {name: " ".join(about.split()) for names, about in items for name in names.split(", ")}


def _fields(kind: Any, without: tuple[str, ...] = ()) -> Iterator[str]:
    hints, texts = typing.get_type_hints(kind), {}
    for cls in reversed(kind.__mro__):
        texts |= _described(cls.__doc__ or "")[1]
    rows = []
    for item in dataclasses.fields(kind):
        if not item.init or item.name in without:
            continue
        if not texts.get(item.name):
            raise ValueError(f"{kind.__name__}.{item.name}: expected a line below Args: of the docstring, got none.")
        default = item.default
        if default is dataclasses.MISSING:
            default = item.default_factory() if item.default_factory is not dataclasses.MISSING else "required"
        shown = "" if default is None else f"`{_toml(default)}`" if default != "required" else "required"
        rows.append(f"| `{item.name}` | {_type(hints[item.name])} | {shown} | {_cell(texts[item.name])} |")
    if rows:
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        yield from rows
        yield ""


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple() | list() | frozenset():
            items = ", ".join(_toml(item) for item in value)
            return f"[{items}]" if len(items) < 60 else f"[… {len(value)}]"
    return str(value) if not dataclasses.is_dataclass(value) else "…"


def _type(hint: Any) -> str:
    names = {
        "int": "integer",
        "float": "number",
        "str": "text",
        "bool": "true, false",
        "NoneType": "",
        "Path": "path",
        "object": "",
    }
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" if value else '`""`' for value in arguments)
    if origin is tuple:
        return "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "table"
    if arguments:
        return " or ".join(dict.fromkeys(text for part in arguments if (text := _type(part))))
    name = getattr(hint, "__name__", str(hint))
    return names.get(name, name)


if __name__ == "__main__":
    sys.exit(main())
