"""StackExchange dumps: `Posts.xml`, plain or compressed, a document a post.

Questions and answers are documents: joining them would need the whole site in memory. An answer's id and address say
where it belongs; addresses come from the name of the file or folder, if it is that of a site. `[read.columns]` may name
attributes of a post: `Score`, `Tags`, `CreationDate` …
"""

import html
import re
from collections.abc import Iterator

from forebay.formats.base import Format
from forebay.formats.html import HtmlError, html_to_text
from forebay.formats.inputs import InputSplit, ReadOptions, open_input
from forebay.formats.records import Record, strip_turn_marks, values_of
from forebay.formats.text import lines_of

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
