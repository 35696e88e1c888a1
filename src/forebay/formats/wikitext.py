"""Wikitext to plain text.

Templates, tables, references, files and categories are left out (a few templates that only dress up their text keep
it); links keep what a reader sees; headings with nothing below them go. The innermost links, templates and tables are
replaced until nothing changes, at most `MAX_DEPTH` times. No expression looks past the next bracket of its kind, so
that each pass is linear in any input (mwparserfromhell is not).
"""

import html
import re
from collections.abc import Callable


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_DEPTH = 40  # What is nested deeper is text.
FILES_AND_CATEGORIES = _words(
    "file image media category datei bild kategorie fichier catégorie archivo imagen categoría immagine "
    "categoria ficheiro imagem bestand afbeelding plik grafika файл изображение категория ファイル 画像 文件 分类 "
    "fil kategori soubor tiedosto kuva luokka fájl kép kategória fișier categorie dosya resim berkas "
    "gambar slika datoteka датотека слика категорија картинка зображення категорія fitxer fitxategi irudi "
    "kategoria ficheru dosiero kategorio pilt kategooria attēls vaizdas súbor obrázok αρχείο εικόνα "
    "κατηγορία קובץ תמונה קטגוריה ملف صورة تصنيف پرونده رده चित्र श्रेणी চিত্র বিষয়শ্রেণী படிமம் ไฟล์ "
    "ภาพ หมวดหมู่ 파일 그림 분류 檔案 图像 圖像 分類 talaksan mynd skrá "
)
"""Names of two namespaces in other languages; that of a dump's own is in its `<siteinfo>`. Source: MediaWiki."""
_DROPPED = (
    "ref|gallery|timeline|score|hiero|templatedata|imagemap|inputbox|graph|mapframe|maplink|section|table|style|script|"
    "templatestyles|indicator|references|categorytree|dynamicpagelist|rss|includeonly|tr"
)
_RAW = "nowiki|math|chem|ce|pre|source|syntaxhighlight"
_BLOCK = re.compile(rf"<(?:!--|({_DROPPED}|{_RAW})(?![A-Za-z0-9])[^<>]{{0,600}}(?<!/)>)", re.IGNORECASE)
"""What begins a comment, or an element whose content is left out or kept as it is."""
_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9]*)[^<>]{0,600}>")
_NEW_LINE = frozenset(
    ("br", "p", "div", "li", "tr", "blockquote", "poem", "ul", "ol", "dl", "dt", "dd", "hr", "center")
)
_LINK = re.compile(r"\[\[([^\[\]|\n]{0,500})(\|(?:[^\[\]]|\[(?!\[)|\](?!\]))*+)?\]\]")
_URL = re.compile(r"\[(?:https?:|ftps?:|mailto:|news:|irc:)?//[^\s\[\]<>{}|\"]{0,3000}[ \t]?([^\[\]]*+)\]")
_TEMPLATE = re.compile(r"\{\{((?:[^{}]|\{(?!\{)|\}(?!\}))*+)\}\}")
_PARAMETER = re.compile(r"\{\{\{[^{}|]{0,200}(?:\|([^{}]*+))?\}\}\}")
_TABLE = re.compile(r"(?m)^[ \t:*#]{0,20}\{\|(?:[^{}|]|\{(?!\|)|\|(?!\}))*+\|\}")
_BRACES = re.compile(r"(?<=\{)(?=\{)|(?<=\})(?=\})")
_QUOTES = re.compile(r"''+")
_STRAY = re.compile(r"\{\|[^\n]*|\[\[|\]\]|\{\{+|\}\}+|(?<!\{)\|\}|__[A-Z]{3,30}__|\[(?=(?:https?:|ftps?:)?//)")
_FILE = re.compile(
    r"\.(?:jpe?g|png|svg|gif|tiff?|webp|xcf|pdf|djvu|stl|og[agv]|opus|webm|mpe?g|mp[34]|wav|flac|midi?)$", re.IGNORECASE
)
"""A file, whatever the language of its namespace."""
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,10}){0,2}|simple")
_CLEANUPS = (
    (re.compile(r" ?[(（][\s,;:/–|]{0,40}[)）]"), ""),
    (re.compile(r"([(（])[\s,;:]{1,40}"), r"\1"),
    (re.compile(r"(?:[,;][ ]?){1,8}([)）])"), r"\1"),
    (re.compile(r"[ \t\u00a0]{2,}|\u00a0"), " "),
)
_LIST = re.compile(r"[*#:;]+[ \t]*")


def _first(arguments: list[str]) -> str:
    return arguments[0] if arguments else ""


def _last(arguments: list[str]) -> str:
    return arguments[-1] if arguments else ""


def _quantity(arguments: list[str]) -> str:
    has_range = len(arguments) > 3 and arguments[1] in ("-", "–", "to", "and", "x", "by", "or")
    return " ".join(arguments[: 4 if has_range else 2])


_TEMPLATES: dict[str, Callable[[list[str]], str]] = {
    **dict.fromkeys(("lang", "transl", "transliteration", "script", "color", "tooltip"), _last),
    **dict.fromkeys(("nowrap", "nobr", "small", "big", "abbr", "sic", "quote", "cquote", "blockquote"), _first),
    **dict.fromkeys(("unicode", "polytonic", "flag", "flagcountry", "sup", "sub", "var", "math", "mvar", "em"), _first),
    **dict.fromkeys(("nihongo", "nihongo2"), lambda arguments: f"{_first(arguments)} ({', '.join(arguments[1:3])})"),
    **dict.fromkeys(("convert", "cvt"), _quantity),
    **dict.fromkeys(("frac", "fraction", "sfrac"), lambda arguments: "/".join(arguments)),
    **dict.fromkeys(("circa", "c."), lambda arguments: f"c. {_first(arguments)}"),
    **dict.fromkeys(("as of", "since"), lambda arguments: f"As of {' '.join(arguments)}"),
    **dict.fromkeys(("ndash", "spaced ndash", "snd", "–"), lambda _: " – "),
    **dict.fromkeys(("mdash", "spaced mdash", "—"), lambda _: " — "),
    **dict.fromkeys(("·", "dot", "•", "bullet"), lambda _: " · "),
    **dict.fromkeys(("nbsp", "spaces"), lambda _: " "),
    "'": lambda _: "'",
    "'s": lambda _: "'s",
    "=": lambda _: "=",
}


def to_text(source: str, dropped_prefixes: frozenset[str] = FILES_AND_CATEGORIES) -> str:
    """Return the plain text of a page's wikitext: paragraphs, headings and list items, a line each.

    Links to pages with `dropped_prefixes` (in lower case) before the colon are left out.
    """
    raw: list[str] = []
    text = _without_blocks(source, raw)
    text = _QUOTES.sub(lambda quotes: "'" if len(quotes[0]) == 4 else "'" * (len(quotes[0]) - 5), text)
    text = _TAG.sub(lambda tag: "\n" if tag[1].lower() in _NEW_LINE else "", text)
    for _ in range(MAX_DEPTH):
        before = text
        text = _LINK.sub(lambda link: _link_text(link, dropped_prefixes), text)
        text = _URL.sub(r"\1", text)
        text = _PARAMETER.sub(lambda parameter: parameter[1] or "", text)
        text = _TABLE.sub("", _TEMPLATE.sub(_template_text, text))
        if text == before:
            break
    text = html.unescape(_STRAY.sub("", text))
    for pattern, replacement in _CLEANUPS:
        text = pattern.sub(replacement, text)
    text = _lines(text)
    return re.sub("\0([0-9]{1,9})\0", lambda number: raw[int(number[1])], text) if raw else text


def _without_blocks(source: str, raw: list[str]) -> str:
    source = source.replace("\0", "")
    out, offset, unclosed = list[str](), 0, set[str]()
    while (match := _BLOCK.search(source, offset)) is not None:
        name = (match[1] or "").lower()
        out.append(source[offset : match.start()])
        offset = match.end()
        end_mark = rf"</{name}\s{{0,50}}>" if name else "-->"
        # A search for an end that is missing is done once only.
        end = None if name in unclosed else re.compile(end_mark, re.IGNORECASE).search(source, offset)
        if end is None:
            unclosed.add(name)
            continue
        if name in _RAW.split("|"):
            content = source[offset : end.start()]
            if name in ("math", "chem", "ce"):
                content = _BRACES.sub(" ", content).strip()  # TeX groups that look like no template.
                content = f"${content}$"
            raw.append(content)
            out.append(f"\0{len(raw) - 1}\0")
        offset = end.end()
    return "".join([*out, source[offset:]])


def _link_text(link: re.Match[str], dropped_prefixes: frozenset[str]) -> str:
    target, label = link[1].strip(), (link[2] or "")[1:]
    prefix, colon, _ = target.partition(":")
    if target.startswith(":"):
        target = target[1:]
    elif colon:
        is_language = link[2] is None and _LANGUAGE.fullmatch(prefix)
        if is_language or prefix.strip().lower() in dropped_prefixes or _FILE.search(target):
            return ""
    return label if label.strip() else target


def _template_text(template: re.Match[str]) -> str:
    name, *parts = template[1].split("|")
    name = name.strip().lower().replace("_", " ")
    show = _TEMPLATES.get(name) or (_last if name.startswith("lang-") else None)
    if show is None:
        return ""
    arguments = []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key.strip() in ("1", "2", "3", "text", "quote"):
            arguments.append((value if equals else part).strip())
    return show(arguments)


def _lines(text: str) -> str:
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
