"""Wikitext to plain text, in one pass.

Hides MediaWiki's markup. Templates, tables, references, files and categories are left out (a few templates that only
dress up their text keep it); links keep what a reader sees; headings with nothing below them go. What is opened and
never closed loses its markers and keeps its text, as MediaWiki shows it. Nesting deeper than `MAX_DEPTH` is not
followed, which is what makes any input linear.

Our own scanner and not mwparserfromhell: as many words as that one finds (see docs/explanation/decisions/0004), about
ten times as fast, and linear on hostile text.
"""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_DEPTH = 40
"""Our choice: what is opened deeper is text. It bounds what a closing marker costs, and with that the whole."""
FILES_AND_CATEGORIES = _words(
    "file image media category datei bild kategorie fichier catégorie archivo imagen categoría immagine categoria "
    "ficheiro imagem bestand afbeelding plik grafika файл "
    "изображение категория ファイル 画像 文件 分类 fil kategori"
)

# Every branch begins with a literal character, so that re passes over plain text by a table of first characters.
_TOKEN = re.compile(
    r"\[\[[^\[\]{}|<>\n:']{0,300}(?:\|[^\[\]{}|<>\n']{0,600})?\]\]"  # a plain link, whole
    r"|\[\[|\]\]|\]"
    r"|\[(?:https?:|ftps?:|mailto:|news:|irc:)?//[^\s\[\]<>{}|\"]{0,3000}[ \t]?"
    r"|\{\{[^{}\[\]<]{0,2000}\}\}(?!\})"  # a plain template, whole
    r"|\{\{+|\}\}+|\{\||\|\}(?!\}(?!\}))|\|"
    r"|''+|<!--|</?[A-Za-z][^<>]{0,600}>|__[A-Z]{3,30}__"
)
_QUOTES = re.compile(r"''+")
_TAG_NAME = re.compile(r"</?([A-Za-z0-9]+)")
_DROPPED = _words(
    "ref gallery timeline score hiero templatedata imagemap inputbox graph mapframe maplink section table style "
    "script templatestyles indicator references categorytree dynamicpagelist rss includeonly tr"
)
_KEPT_RAW = _words("nowiki math chem ce pre source syntaxhighlight")
_END_TAGS = {name: re.compile(rf"</{name}\s{{0,50}}>", re.IGNORECASE) for name in _DROPPED | _KEPT_RAW}
_TABLE_BEFORE = re.compile(r"[ \t:*#]{0,20}\{")
_NEW_LINE = _words("br p div li tr blockquote poem ul ol dl dt dd hr center")
_FILE = re.compile(
    r"\.(?:jpe?g|png|svg|gif|tiff?|webp|xcf|pdf|djvu|stl|og[agv]|opus|webm|mpe?g|mp[34]|wav|flac|midi?)$", re.IGNORECASE
)
"""A file, whatever the language of its namespace."""
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,10}){0,2}|simple")
_EMPTY_BRACKETS = re.compile(r" ?[(（][\s,;:/–|]{0,40}[)）]")
_LEADING_MARKS = re.compile(r"([(（])[\s,;:]{1,40}")
_TRAILING_MARKS = re.compile(r"(?:[,;][ ]?){1,8}([)）])")
_BLANKS = re.compile(r"[ \t\u00a0]{2,}")
_LIST = re.compile(r"[*#:;]+[ \t]*")


@dataclass
class _Open:
    """Something opened and not closed yet: where its output begins, and where its arguments do."""

    kind: str
    start: int
    pipes: list[int] = field(default_factory=list)


def _first(arguments: list[str]) -> str:
    return arguments[0] if arguments else ""


def _last(arguments: list[str]) -> str:
    return arguments[-1] if arguments else ""


def _quantity(arguments: list[str]) -> str:
    if len(arguments) > 3 and arguments[1] in ("-", "–", "to", "and", "x", "by", "or"):
        return f"{arguments[0]} {arguments[1]} {arguments[2]} {arguments[3]}"
    return " ".join(arguments[:2])


def _nihongo(arguments: list[str]) -> str:
    native = ", ".join(part for part in arguments[1:3] if part)
    return f"{_first(arguments)} ({native})" if native else _first(arguments)


def _fraction(arguments: list[str]) -> str:
    if len(arguments) == 3:
        return f"{arguments[0]} {arguments[1]}/{arguments[2]}"
    return "/".join(arguments) if len(arguments) == 2 else "1/" + _first(arguments)


_TEMPLATES: dict[str, Callable[[list[str]], str]] = {
    **dict.fromkeys(("lang", "transl", "transliteration", "script", "color", "tooltip"), _last),
    **dict.fromkeys(
        ("nowrap", "nobr", "small", "big", "abbr", "sic", "quote", "cquote", "blockquote", "bquote"), _first
    ),
    **dict.fromkeys(("unicode", "polytonic", "flag", "flagcountry", "sup", "sub", "var", "math", "mvar", "em"), _first),
    **dict.fromkeys(("convert", "cvt"), _quantity),
    **dict.fromkeys(("nihongo", "nihongo2"), _nihongo),
    **dict.fromkeys(("frac", "fraction", "sfrac"), _fraction),
    **dict.fromkeys(("circa", "c."), lambda arguments: f"c. {_first(arguments)}"),
    **dict.fromkeys(("as of", "since"), lambda arguments: f"As of {' '.join(arguments)}"),
    **dict.fromkeys(("ndash", "spaced ndash", "snd", "–"), lambda _: " – "),
    **dict.fromkeys(("mdash", "spaced mdash", "—"), lambda _: " — "),
    **dict.fromkeys(("·", "dot", "•", "bullet"), lambda _: " · "),
    "'": lambda _: "'",
    "'s": lambda _: "'s",
    "=": lambda _: "=",
    "nbsp": lambda _: " ",
    "spaces": lambda _: " ",
}


def _show(name: str) -> Callable[[list[str]], str] | None:
    """What a template by this name shows; None if nothing."""
    name = name.strip().lower().replace("_", " ")
    return _TEMPLATES.get(name) or (_last if name.startswith("lang-") else None)


def _arguments(parts: list[str]) -> list[str]:
    """The arguments of a template that are text: those without a name, or with one that stands for a place."""
    arguments = []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            arguments.append(part.strip())
        elif key.strip() in ("1", "2", "3", "text", "quote"):
            arguments.append(value.strip())
    return arguments


class _Scan:
    """One pass over a page's wikitext."""

    def __init__(self, source: str, dropped_prefixes: frozenset[str]) -> None:
        self._source = source
        self._prefixes = dropped_prefixes
        self._out: list[str] = []
        self._stack: list[_Open] = []
        self._unclosed: set[str] = set()

    def text(self) -> str:
        """Return the text of the page."""
        source, offset = self._source, 0
        out, stack, search = self._out, self._stack, _TOKEN.search
        match = search(source)
        while match is not None:
            start = match.start()
            if start > offset:
                out.append(source[offset:start])
            offset = match.end()
            token = match[0]
            if token == "|":
                if stack:
                    stack[-1].pipes.append(len(out))
                out.append("|")
            elif token[0] == "'":
                out.append("'" if len(token) == 4 else "'" * (len(token) - 5))
            elif token[0] == "<":
                offset = self._past("-->", offset) if token == "<!--" else self._tag(token, offset)
            elif token[0] in "[]":
                self._brackets(token)
            elif token[0] in "{}|":
                self._braces(token, start)
            match = search(source, offset)
        out.append(source[offset:])
        return "".join(out)

    def _brackets(self, token: str) -> None:
        if token == "[[":
            self._open("link")
        elif token == "]]":
            self._close_link()
        elif token == "]":
            if self._stack and self._stack[-1].kind == "url":
                self._stack.pop()
            else:
                self._out.append("]")
        elif token[1] != "[":
            self._open("url")
        else:
            target, pipe, label = token[2:-2].partition("|")
            shown = self._shown(target.strip(), bool(pipe))
            if shown is not None:
                self._out.append(label if label.strip() else shown)

    def _braces(self, token: str, start: int) -> None:
        if token == "{|":
            if _TABLE_BEFORE.match(self._source, self._source.rfind("\n", max(0, start - 20), start) + 1, start + 1):
                self._open("table")
                self._out.append("{|")  # one that is never closed loses this line
        elif token == "|}":
            if (opened := self._pop("table")) is not None:
                del self._out[opened.start :]
        elif token[0] == "}":
            self._close_templates(len(token) // 2)
        elif token[-1] == "}":
            parts = token[2:-2].split("|")
            show = _show(parts[0])
            if show is not None:
                self._out.append(_QUOTES.sub("", show(_arguments(parts[1:]))))
        else:
            for _ in range(min(len(token) // 2, MAX_DEPTH + 1)):
                self._open("template")

    def _open(self, kind: str) -> None:
        if len(self._stack) < MAX_DEPTH:
            self._stack.append(_Open(kind, len(self._out)))

    def _pop(self, kind: str) -> _Open | None:
        """The innermost open thing of a kind; what was opened within it and not closed is text."""
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index].kind == kind:
                opened = self._stack[index]
                del self._stack[index:]
                return opened
        return None

    def _past(self, mark: str, offset: int) -> int:
        """Past the next mark; where we are if there is none, which is looked for once only."""
        if mark in self._unclosed:
            return offset
        end = self._source.find(mark, offset)
        if end < 0:
            self._unclosed.add(mark)
            return offset
        return end + len(mark)

    def _tag(self, tag: str, offset: int) -> int:
        match = _TAG_NAME.match(tag)
        name = match[1].lower() if match else ""
        if name in _NEW_LINE:
            self._out.append("\n")
        raw = name in _KEPT_RAW
        if tag.endswith("/>") or tag.startswith("</") or not (raw or name in _DROPPED) or name in self._unclosed:
            return offset
        end = _END_TAGS[name].search(self._source, offset)
        if end is None:
            self._unclosed.add(name)
            return offset
        if raw:
            text = self._source[offset : end.start()]
            if name in ("math", "chem", "ce"):  # TeX groups read the same with a blank, and look like no template
                for braces in ("}}", "}}", "{{", "{{"):  # twice, for three in a row
                    text = text.replace(braces, " ".join(braces))
                text = f"${text.strip()}$"
            self._out.append(text)
        return end.end()

    def _close_templates(self, count: int) -> None:
        for _ in range(min(count, MAX_DEPTH + 1)):
            opened = self._pop("template")
            if opened is None:
                return
            text = self._template(opened)
            del self._out[opened.start :]
            if text:
                self._out.append(text)

    def _template(self, opened: _Open) -> str:
        first = opened.pipes[0] if opened.pipes else len(self._out)
        show = _show("".join(self._out[opened.start : first][:3]))
        if show is None:
            return ""
        bounds = [*opened.pipes, len(self._out)]
        return show(_arguments(["".join(self._out[start + 1 : stop]) for start, stop in pairwise(bounds)]))

    def _close_link(self) -> None:
        if self._stack and self._stack[-1].kind == "url" and not any(o.kind == "link" for o in self._stack):
            self._stack.pop()
            return
        opened = self._pop("link")
        if opened is None:
            return
        first = opened.pipes[0] if opened.pipes else len(self._out)
        target = "".join(self._out[opened.start : first])
        if "\n" in target[:500].strip():
            return
        shown = self._shown(target.strip(), bool(opened.pipes))
        if shown is None:
            del self._out[opened.start :]
        elif opened.pipes and any(part.strip() for part in self._out[opened.pipes[0] + 1 :]):
            del self._out[opened.start : opened.pipes[0] + 1]
        else:
            self._out[opened.start :] = [shown]

    def _shown(self, target: str, labelled: bool) -> str | None:
        """What a link shows if it has no label; None if the link is not part of the text."""
        if target.startswith(":"):
            return target[1:]
        prefix, colon, _ = target.partition(":")
        if colon and (prefix.strip().lower() in self._prefixes or _FILE.search(target)):
            return None
        if colon and not labelled and _LANGUAGE.fullmatch(prefix):
            return None
        return target


def to_text(source: str, dropped_prefixes: frozenset[str] = FILES_AND_CATEGORIES) -> str:
    """The plain text of a page's wikitext: paragraphs, headings and list items, a line each.

    Links to pages with `dropped_prefixes` (in lower case) before the colon are left out.
    Cost: linear in `len(source)` for any input; about 17 MB a CPU second on articles.
    """
    text = _Scan(source, dropped_prefixes).text()
    if "&" in text:
        text = html.unescape(text)
    text = _EMPTY_BRACKETS.sub("", text)
    text = _LEADING_MARKS.sub(r"\1", text)
    text = _TRAILING_MARKS.sub(r"\1", text)
    return _lines(_BLANKS.sub(" ", text).replace("\u00a0", " "))


def _lines(text: str) -> str:
    """Headings without their signs and not without text below them; list items; no table rows left over."""
    result: list[str] = []
    headings: list[tuple[int, str]] = []
    for line in text.split("\n"):
        line = line.strip()
        if len(line) > 2 and line[0] == "=" and line[-1] == "=":
            title = line.strip("=")
            level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")))
            while headings and headings[-1][0] >= level:
                headings.pop()
            if title.strip():
                headings.append((level, title.strip()))
            continue
        if line[:1] in ("|", "!") or line.startswith(("----", "{|")):
            continue
        if line[:1] in ("*", "#", ":", ";"):
            bullet = "- " if line[0] in "*#" else ""
            line = _LIST.sub("", line, count=1).strip()
            line = bullet + line if line and not line.startswith("{|") else ""
        if line and headings:
            result.extend([""] if result and result[-1] else [])
            result.extend(title for _, title in headings)
            headings.clear()
        if line or (result and result[-1]):
            result.append(line)
    return "\n".join(result).strip("\n")
