"""Reddit dumps (`RC_2020-01.zst`, `RS_2020-01.zst`): a document a comment or submission.

Hides which fields hold the text, and how deletion is marked. What was deleted or removed is no document.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import replace

import orjson

from forebay.formats.base import Format
from forebay.formats.inputs import InputSplit, ReadOptions
from forebay.formats.jsonl import Jsonl
from forebay.formats.records import Record, Row, has_surrogate, name_of, strip_turn_marks, values_of
from forebay.formats.text import Lines

REMOVED = frozenset(("[deleted]", "[removed]", "[ Removed by Reddit ]", "[deleted by user]"))
"""The text in place of one that its author or a moderator removed."""
_SITE = "https://www.reddit.com"


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
        return link if link.startswith("http") else _SITE + link
    if not isinstance(subreddit, str) or not isinstance(own, str):
        return ""
    thread = post.get("link_id")
    if isinstance(thread, str):
        return f"{_SITE}/r/{subreddit}/comments/{thread.removeprefix('t3_')}/_/{own}"
    return f"{_SITE}/r/{subreddit}/comments/{own}"
