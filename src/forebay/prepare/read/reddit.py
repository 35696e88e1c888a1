"""Reddit dumps (`RC_2020-01.zst`, `RS_2020-01.zst`): a document a comment or submission.

Hides: which fields hold the text, and what deletion looks like. Lines are read as `lines` reads them, windows of zstd
up to 2 GiB too. What was deleted or removed is no document. Option: `min_score`.
"""

import html
from collections.abc import Iterator, Mapping
from dataclasses import replace

import orjson

from forebay.prepare.documents import Record, strip_turn_marks
from forebay.prepare.read.base import Format, Piece, ReadOptions
from forebay.prepare.read.fields import min_score_of, name_of, surrogate_in
from forebay.prepare.read.lines import LINES

GONE = frozenset(("[deleted]", "[removed]", "[ Removed by Reddit ]", "[deleted by user]"))
"""What stands in place of a text that its author or a moderator took away."""
_SITE = "https://www.reddit.com"


def read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The comments and submissions of a dump, as `Format.read` says."""
    least = min_score_of(options)
    for line in LINES.read(piece, options):
        if line.problem:
            yield line
            continue
        try:
            post = orjson.loads(line.text)
        except ValueError as error:
            yield replace(line, text=line.text[:200], problem=f"not JSON: {error}")
            continue
        if not isinstance(post, dict):
            problem = f"expected an object, got {type(post).__name__}"
            yield replace(line, text=line.text[:200], problem=problem)
            continue
        score = post.get("score")
        if least is not None and isinstance(score, int) and score < least:
            continue
        text, problem = text_of(post)
        if problem:
            yield replace(line, text=line.text[:200], problem=problem)
        elif text:
            name = name_of(post.get("name")) or name_of(post.get("id"))
            yield Record(line.place, name, text, url_of(post), where=line.where)


def text_of(post: Mapping[str, object]) -> tuple[str, str]:
    """The text of a comment or submission, "" if it is gone; and what is wrong with it."""
    if "body" in post:
        parts = [post["body"]]
    elif "title" in post:
        parts = [post["title"], post.get("selftext") or ""]
    else:
        return "", "expected a body (a comment) or a title (a submission), got neither"
    if not all(isinstance(part, str) for part in parts):
        return "", "expected a text, got " + ", ".join(type(part).__name__ for part in parts)
    texts = [html.unescape(str(part)).strip() for part in parts]
    if any(text in GONE for text in texts):
        return "", ""
    text = strip_turn_marks("\n\n".join(text for text in texts if text))
    return (text, "") if not surrogate_in(text) else ("", "half a surrogate pair in the text")


def url_of(post: Mapping[str, object]) -> str:
    """Its address; of old dumps, which lack it, made from what they have."""
    link, subreddit, own = post.get("permalink"), post.get("subreddit"), post.get("id")
    if isinstance(link, str) and link:
        return link if link.startswith("http") else _SITE + link
    if not isinstance(subreddit, str) or not isinstance(own, str):
        return ""
    thread = post.get("link_id")
    if isinstance(thread, str):
        return f"{_SITE}/r/{subreddit}/comments/{thread.removeprefix('t3_')}/_/{own}"
    return f"{_SITE}/r/{subreddit}/comments/{own}"


REDDIT = Format("reddit", read, LINES.cut)
