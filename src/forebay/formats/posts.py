"""Dumps of sites where people post: StackExchange and Reddit.

StackExchange dumps: `Posts.xml`, plain or compressed, a document a post.

Questions and answers are documents: joining them would need the whole site in memory. An answer's id and address say
where it belongs; addresses come from the name of the file or folder, if it is that of a site. `[read.columns]` may name
attributes of a post: `Score`, `Tags`, `CreationDate` …

Reddit dumps (`RC_2020-01.zst`, `RS_2020-01.zst`): a document a comment or submission.

Hides which fields hold the text, and how deletion is marked. What was deleted or removed is no document.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import replace

import orjson

from forebay.formats.base import Format
from forebay.formats.html import HtmlError, html_to_text
from forebay.formats.inputs import InputSplit, ReadOptions, open_input
from forebay.formats.jsonl import Jsonl
from forebay.formats.records import Record, Row, has_surrogate, name_of, strip_turn_marks, values_of
from forebay.formats.text import Lines, lines_of

_ATTRIBUTE = re.compile(r'([A-Za-z]{1,40})="([^"]*)"')
_TABLES = re.compile(
    rb'<posts|<row Id="\d+" PostTypeId="|<(badges|comments|posthistory|postlinks|tags|users|votes)>\s*<row '
)
"""Of posts, and of what is beside them in a dump, which has no posts."""
_SITE = re.compile(
    r"(?:[a-z0-9-]{1,40}\.){0,3}(?:stackexchange|stackoverflow|serverfault|superuser|askubuntu|mathoverflow|stackapps)(?:\.com|\.net)"
)


class StackExchange(Format):
    """`Posts.xml`, plain or compressed."""

    name = "stackexchange"
    suffixes = ("posts.xml",)
    is_plain_text = True  # Rows are read one by one, without the XML declaration.

    def sniff(self, head: bytes) -> bool:
        return _TABLES.search(head, 0, 1024) is not None

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        file = split.files[0]
        with open_input(file, options) as stream:
            sites = [site[0] for part in re.split(r"[/\\]", file.path) if (site := _SITE.match(part.lower()))]
            index = -1
            for offset, line, problem in lines_of(stream, options):  # Dumps have one row a line.
                row = line.strip()
                if not problem and not row.startswith(b"<row"):
                    continue
                index += 1
                if not row.endswith((b"/>", b"</row>")):
                    problem = problem or "a row that does not end"
                location, start, post = f"byte {offset}", row[:512].decode("utf-8", "replace"), dict[str, str]()
                try:
                    post = dict(_ATTRIBUTE.findall(row.decode("utf-8")))
                except UnicodeDecodeError as error:
                    problem = problem or f"not UTF-8: {error.reason} at byte {error.start}"
                if problem or "Id" not in post:
                    yield Record(index, text=start, problem=problem or "a row without Id", location=location)
                elif post.get("PostTypeId") in ("1", "2"):  # Questions and answers.
                    try:
                        yield _document(index, post, sites[-1] if sites else "", location, options)
                    except HtmlError as error:
                        yield Record(index, post["Id"], start, problem=str(error), location=location)


def _document(index: int, post: dict[str, str], site: str, location: str, options: ReadOptions) -> Record:
    text = html_to_text(html.unescape(post.get("Body", "")))
    if title := strip_turn_marks(html.unescape(post.get("Title", ""))).strip():
        text = f"{title}\n\n{text}"
    kind = "a" if post.get("PostTypeId") == "2" else "q"
    values = values_of({name: html.unescape(post.get(name, "")) for name in options.columns}, options)
    url = f"https://{site}/{kind}/{post['Id']}" if site else ""
    return Record(index, post["Id"], text, url, location=location, values=values)


REMOVED = frozenset(("[deleted]", "[removed]", "[ Removed by Reddit ]", "[deleted by user]"))
"""The text in place of one that its author or a moderator removed."""
_REDDIT = "https://www.reddit.com"


class Reddit(Jsonl):
    """Dumps of comments or submissions; as JSON lines otherwise."""

    name = "reddit"
    suffixes: tuple[str, ...] = ()
    is_plain_text = False
    write_rows = Format.write_rows  # converts to JSON lines under their own name

    def sniff(self, head: bytes) -> bool:
        line = head.partition(b"\n")[0]
        return (
            line.startswith(b"{")
            and re.search(rb'"subreddit(_id)?"\s*:', line) is not None
            and re.search(rb'"(body|selftext|link_id|num_comments)"\s*:', line) is not None
            and re.search(rb'"text"\s*:', line) is None
        )

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        for line in Lines().read_text(split, options):
            if line.problem:
                yield line
                continue
            try:
                post = orjson.loads(line.text)
                text, problem = text_of(post)
            except ValueError as error:
                text, problem = "", f"not JSON: {error}"
            if problem:
                yield replace(line, text=line.text[:200], problem=problem)
            elif text:
                name = name_of(post.get("name")) or name_of(post.get("id"))
                values = values_of(post, options)
                yield Record(line.index, name, text, url_of(post), location=line.location, values=values)


def text_of(post: object) -> tuple[str, str]:
    """Return the text of a comment or submission, "" if it is gone; and what is wrong with it."""
    if not isinstance(post, dict):
        return "", f"expected an object, got {type(post).__name__}"
    if "body" in post:
        parts = [post["body"] or ""]
    elif "title" in post:
        parts = [post["title"] or "", post.get("selftext") or ""]
    else:
        return "", "expected a body (a comment) or a title (a submission), got neither"
    if not all(isinstance(part, str) for part in parts):
        return "", "expected a text, got " + ", ".join(type(part).__name__ for part in parts)
    texts = [html.unescape(str(part)).strip() for part in parts]
    if any(text in REMOVED for text in texts):
        return "", ""
    text = strip_turn_marks("\n\n".join(text for text in texts if text))
    return (text, "") if not has_surrogate(text) else ("", "half a surrogate pair in the text")


def url_of(post: Row) -> str:
    """Return its address; of old dumps, which lack it, made from what they have."""
    link, subreddit, own = post.get("permalink"), post.get("subreddit"), post.get("id")
    if isinstance(link, str) and link:
        return link if link.startswith("http") else _REDDIT + link
    if not isinstance(subreddit, str) or not isinstance(own, str):
        return ""
    thread = post.get("link_id")
    if isinstance(thread, str):
        return f"{_REDDIT}/r/{subreddit}/comments/{thread.removeprefix('t3_')}/_/{own}"
    return f"{_REDDIT}/r/{subreddit}/comments/{own}"
