"""Documents as readers yield them, and how a row, line or object with fields becomes one.

Hides: dotted keys, the shapes in which conversations are stored, and characters that must not be in a text.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from typing import TypeAlias, TypeVar
from uuid import UUID

from forebay.errors import did_you_mean, listed
from forebay.formats.inputs import ALL_FIELDS, TEXT_KEYS, ReadOptions

T = TypeVar("T")
Row: TypeAlias = Mapping[str, object]

PROMPT_MARK, RESPONSE_MARK, HEADER_MARK = "\ufdd0", "\ufdd1", "\ufdd2"
"""What begins a turn of a conversation whose tokens are masked (a prompt), or learnt (a response), inside `text`.
With `keep_roles`, a header follows where a message has more than its role and content: JSON between two HEADER_MARKs.
Unicode reserves these noncharacters for internal use; readers remove them from what they read."""
_MARKS = re.compile("[\ufdd0-\ufddf]")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
SHOWN_CHARS = 200  # Of a malformed record.
_LEARNT_ROLES = ("assistant", "gpt", "model", "bot")


@dataclass(frozen=True)
class Record:
    """One document as a reader yields it, or what is wrong with it.

    A record with a `problem` is malformed: it is counted, and stored with its location, `problem` and the first bytes
    of `text`. `problem="blank"` is no document and is not counted (an empty line). A record without a problem whose
    `text` is empty or white space is an ordinary absence (a null, a page without text): it is counted as `empty`.

    `location` is where it stands in its file, if that is not its line, row or record number `index` (from 0):
    `byte 5120`, `page "Anarchism"`, `inner/file.txt`.

    `start`, if not -1: a split with this `start` begins with this record, so that reading may continue from here. In
    unpacked bytes where a format is a stream of them.

    `failed`: the problem is that nothing (more) of its file can be read, not a fault of one record.

    `unread`: how many bytes of its file are not read because of the problem; -1: the rest, of unknown size.

    `is_cut`: the problem is that its file ends in this record; all bytes that are there are read.

    `values`: what `ReadOptions.columns` asks for, in that order.

    `fields`: the texts of `ReadOptions.text_keys`, which `text` joins.

    `missing`: what is wrong with a file all of whose records are like this one, which lacks the key of its text.
    """

    index: int
    id: str = ""
    text: str = ""
    url: str = ""
    html: bool = False
    problem: str = ""
    location: str = ""
    start: int = field(default=-1, compare=False)
    failed: bool = False
    values: tuple[float | str, ...] = ()
    fields: tuple[str, ...] = ()
    missing: str = field(default="", compare=False)
    unread: int = 0
    is_cut: bool = False


def strip_turn_marks(text: str) -> str:
    """Return the text without the noncharacters that begin turns: no input may bring its own."""
    return _MARKS.sub("", text)


def shown(data: bytes) -> str:
    """Return the beginning of malformed bytes as text that can be stored."""
    return data[:SHOWN_CHARS].decode("utf-8", "replace")


def malformed(index: int, data: bytes, problem: str, location: str = "", start: int = -1) -> Record:
    """Return the record of bytes that are no document."""
    return Record(index, text=shown(data), problem=problem, location=location, start=start)


def shown_text(text: str) -> str:
    """Return the beginning of a text, which may hold half a surrogate pair, as text that can be stored."""
    return without_surrogates(text[:SHOWN_CHARS])


def without_surrogates(text: str) -> str:
    """Return the text as UTF-8 can hold it: `?` for half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def batched(items: Iterable[T], weigh: Callable[[T], int], max_weight: int, max_items: int) -> Iterator[list[T]]:
    """Yield items in lists, each of which ends once its items weigh `max_weight` or are `max_items`."""
    batch = []
    weight = 0
    for item in items:
        batch.append(item)
        weight += weigh(item)
        if weight >= max_weight or len(batch) >= max_items:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def look_up(row: Row, key: str) -> object:
    """Return the value under a key, or else at the end of the dots in it; None if there is none."""
    if key in row:
        return row[key]
    value: object = row
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def has_pairs(options: ReadOptions) -> bool:
    """Return whether a document is a prompt and its response, each under a key of its own."""
    return bool(options.prompt_key and options.response_key and not options.messages_key)


def keys_of(options: ReadOptions) -> tuple[list[str], list[str]]:
    """Return the keys without which there is no document, and those that a document may lack."""
    if options.messages_key:
        required = [options.messages_key]
    elif has_pairs(options):
        required = [options.prompt_key, options.response_key]
    else:
        required = [options.text_key] if isinstance(options.text_key, str) else list(options.text_key)
    optional = dict.fromkeys((options.id_key, options.url_key, *options.columns))
    return required, [key for key in optional if key and key not in required]


def to_record(index: int, row: Row, options: ReadOptions, location: str = "", start: int = -1) -> Record:
    """Return the document in a row, or what is wrong with it."""
    fields: tuple[str, ...] = ()
    if options.messages_key:
        text, problem = _conversation(row, options.messages_key, options.keep_roles)
    elif has_pairs(options):
        (prompt, problem), (response, other) = _text(row, options.prompt_key), _text(row, options.response_key)
        problem, is_whole = problem or other, prompt is not None and response and not response.isspace()
        text = f"{PROMPT_MARK}{prompt}{RESPONSE_MARK}{response}" if is_whole else ""
    elif options.text_keys:
        names = [key for key in row if key not in (options.id_key, options.url_key)]
        keys = names if ALL_FIELDS in options.text_keys else options.text_keys
        fields = tuple(field for key in keys if (field := "\n".join(_texts(look_up(row, key)))))
        text, problem = "\n\n".join(fields), ""
    else:
        value, problem = _text(row, str(options.text_key))
        text = value or ""
    name, url = source_of(row, options)
    if len(text) > options.max_document_bytes:
        problem = f"larger than max_document_bytes, {options.max_document_bytes}"
    if problem:
        return Record(index, name, text[:SHOWN_CHARS], problem=problem, location=location, start=start)
    if not text:
        return Record(index, name, location=location, start=start, missing=_missing(row, options))
    values = values_of(row, options)
    return Record(index, name, text, url, location=location, start=start, values=values, fields=fields)


_PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"),
)  # fmt: skip


def key_advice(options: ReadOptions, names: Collection[str], longest: str = "NAME") -> str:
    """Return the setting that names the text of records with these fields, of which `longest` has most text."""
    for setting in ("messages_key", "prompt_key", "response_key", "text_key"):
        key = getattr(options, setting)
        is_lacking = key in keys_of(options)[0] and key not in (TEXT_KEYS[0], *names)
        if is_lacking and (hint := did_you_mean(key, names, f"--set read.{setting}=")):
            return hint.strip()
    pairs = [pair for pair in _PAIRS if set(pair) <= set(names)]
    if has_pairs(options) or (options.messages_key and pairs):
        prompt, response = pairs[0] if pairs else ("NAME", "NAME")
        return (
            f"Pairs are read with {'--set read.messages_key= ' * bool(options.messages_key)}"
            f"--set read.prompt_key={prompt} --set read.response_key={response}."
        )
    chats = [name for name in ("messages", "conversations") if name in names]
    if options.messages_key:
        return f"Name the list of messages with --set read.messages_key={chats[0] if chats else 'NAME'}."
    if chats:
        return (
            f"These are chats: forebay prepare --recipe sft --set read.messages_key={chats[0]} makes rows of them, "
            "which forebay.Loader reads."
        )
    keys = json.dumps([*(options.text_keys or ["text"]), longest])
    more = f" (beside other files: --set 'read.text_key={keys}')" * (longest != "NAME")
    return f"Name it with --set read.text_key={longest}{more}."


def _longest_text(row: Row, before: str = "") -> tuple[int, str]:
    """Return the length and the key of the longest text of several words, also inside of objects."""
    longest = 0, "NAME"
    for name, value in row.items():
        if isinstance(value, Mapping) and before.count(".") < 8:  # A hostile row may be deep.
            longest = max(longest, _longest_text(value, f"{before}{name}."))
        elif isinstance(value, str) and " " in value and re.fullmatch(r"[\w.-]+", key := f"{before}{name}"):
            longest = max(longest, (len(value), key))
    return longest


def _missing(row: Row, options: ReadOptions) -> str:
    keys = keys_of(options)[0]
    lacking = [key for key in keys if key not in row and key.partition(".")[0] not in row]
    if ALL_FIELDS in keys or not lacking or (len(lacking) < len(keys) and not has_pairs(options)):
        return ""
    return (
        f"expected text under {', '.join(map(repr, TEXT_KEYS if keys == [TEXT_KEYS[0]] else lacking))}, got nothing"
        f"{f' among {listed(row)}' * bool(row)}, in every record. {key_advice(options, row, _longest_text(row)[1])}"
    )


def source_of(row: Row, options: ReadOptions) -> tuple[str, str]:
    """Return the id and the URL of a row, "" if there is none."""
    url = look_up(row, options.url_key) if options.url_key else ""
    name = name_of(look_up(row, options.id_key)) if options.id_key else ""
    return name, name_of(url) if isinstance(url, str) else ""


def values_of(row: Row, options: ReadOptions) -> tuple[float | str, ...]:
    """Return the values of the columns of `ReadOptions.columns` in a row."""
    return column_values(options, lambda key: look_up(row, key)) if options.columns else ()


def column_values(options: ReadOptions, find: Callable[[str], object]) -> tuple[float | str, ...]:
    """Return the values of the columns of `ReadOptions.columns`, given what finds one by name; NaN or "" for none."""
    return tuple(_value(find(name), kind) for name, kind in options.columns.items())


def _value(value: object, kind: str) -> float | str:
    if kind == "text":
        return name_of(value)
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def name_of(value: object) -> str:
    """Return an id as text: that of strings, numbers, moments (ISO 8601), bytes (hexadecimal if no ASCII); else ""."""
    if isinstance(value, str):
        return value if value.isascii() else without_surrogates(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value) if value.is_integer() else value)
    if isinstance(value, bytes):
        return value.decode() if value.isascii() and value.decode().isprintable() else value.hex()
    if isinstance(value, date):
        return value.isoformat()
    return str(value) if isinstance(value, int | Decimal | UUID) and not isinstance(value, bool) else ""


def has_surrogate(text: str) -> bool:
    """Return whether a text has half a surrogate pair, and so cannot be UTF-8."""
    try:
        return not text.isascii() and not text.encode()
    except UnicodeEncodeError:
        return True


def _text(row: Row, key: str) -> tuple[str | None, str]:
    value = look_up(row, key)
    if isinstance(value, bytes):  # of a binary column, or a text column with bytes that are no text
        try:
            return strip_turn_marks(value.decode()), ""
        except UnicodeDecodeError as error:
            return shown(value), f"not UTF-8: {error.reason} at byte {error.start}"
    if isinstance(value, str):
        return strip_turn_marks(value), ""
    return None, "" if value is None else f"expected a string under {key!r}, got {type(value).__name__}"


def _texts(value: object) -> Iterator[str]:
    """All texts in a value, those in lists and objects too."""
    if isinstance(value, str):
        yield strip_turn_marks(value)
    elif isinstance(value, bytes):
        yield strip_turn_marks(value.decode("utf-8", "replace"))
    elif isinstance(value, Mapping | list | tuple):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(member)


def _conversation(row: Row, key: str, keep_roles: bool) -> tuple[str, str]:
    turns = look_up(row, key)
    if turns is None:
        return "", ""
    if not isinstance(turns, list):
        return "", f"expected a list of messages under {key!r}, got {type(turns).__name__}"
    texts, is_empty = [], True
    for index, turn in enumerate(turns):
        role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None
        if isinstance(content, list):
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        content = "" if content is None and role is not None else content
        if not isinstance(role, str) or not isinstance(content, str):
            return "", f"expected a role and a content, two strings, in message {index} under {key!r}"
        header = _header(row, turn, role, index == 0) if keep_roles else ""
        texts.append((RESPONSE_MARK if role in _LEARNT_ROLES else PROMPT_MARK) + header + strip_turn_marks(content))
        is_empty = is_empty and not header and not content.strip()
    return "" if is_empty else "".join(texts), ""


def _header(row: Row, turn: Row, role: str, is_first: bool) -> str:
    """What a message has beside its content, and in the first the conversation's tools; "" for a plain one."""
    role = _ROLES.get(role, role)
    fields = {name: value for name, value in turn.items() if value is not None}
    for name in ("role", "from", "content", "value"):
        fields.pop(name, None)
    if role not in ("user", "assistant"):
        fields["role"] = role
    if is_first and row.get("tools"):
        fields["tools"] = row["tools"]
    text = json.dumps(fields, ensure_ascii=False, default=str) if fields else ""
    return HEADER_MARK + strip_turn_marks(text) + HEADER_MARK if text else ""
