"""From the fields of a row, line or object to a Record: text, id, URL, and the turns of a conversation.

Hides: dotted keys, the shapes in which conversations are written down, and characters that must not be in a text.
"""

import math
from collections.abc import Mapping, Sequence

from forebay.errors import UsageError
from forebay.prepare.documents import PROMPT_MARK, RESPONSE_MARK, Record, strip_turn_marks
from forebay.prepare.read.base import ReadOptions

_LEARNT_ROLES = ("assistant", "gpt", "model", "bot")
_SHOWN = 200


def look_up(row: Mapping[str, object], key: str) -> object:
    """The value under a key, or else at the end of the dots in it; None if there is none."""
    if key in row:
        return row[key]
    value: object = row
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def keys_of(options: ReadOptions) -> tuple[list[str], list[str]]:
    """The keys without which there is no document, and those that a document may lack."""
    if options.messages_key:
        needed = [options.messages_key]
    elif options.prompt_key and options.response_key:
        needed = [options.prompt_key, options.response_key]
    else:
        needed = [options.text_key]
    wanted = dict.fromkeys((options.id_key, options.url_key, *options.columns))
    return needed, [key for key in wanted if key and key not in needed]


def to_record(place: int, row: Mapping[str, object], options: ReadOptions, where: str = "", start: int = -1) -> Record:
    """The document in a row, or what is wrong with it."""
    if options.messages_key:
        text, problem = _conversation(row, options.messages_key)
    elif options.prompt_key and options.response_key:
        (prompt, problem), (response, other) = _text(row, options.prompt_key), _text(row, options.response_key)
        text, problem = PROMPT_MARK + prompt + RESPONSE_MARK + response, problem or other
    else:
        text, problem = _text(row, options.text_key)
    name = name_of(look_up(row, options.id_key)) if options.id_key else ""
    url = look_up(row, options.url_key) if options.url_key else ""
    if len(text) > options.max_document_bytes:
        problem = f"larger than max_document_bytes, {options.max_document_bytes}"
    if problem:
        return Record(place, name, text[:_SHOWN], problem=problem, where=where, start=start)
    values = tuple(_value(look_up(row, key), kind) for key, kind in options.columns.items()) if options.columns else ()
    url = name_of(url) if isinstance(url, str) else ""
    return Record(place, name, text, url, where=where, start=start, values=values)


def _value(value: object, kind: str) -> float | str:
    """What a column of that kind holds of a field: a field that is missing or of another kind is NaN, or ""."""
    if kind == "text":
        return name_of(value)
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def name_of(value: object) -> str:
    """An id as text: strings and integers are ids, all else is none."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""


def integers_of(options: ReadOptions, name: str, default: Sequence[int], advice: str) -> frozenset[int]:
    """The numbers that an option of a format lists."""
    given = options.options.get(name, default)
    if not isinstance(given, (list, tuple)) or not all(isinstance(number, int) for number in given):
        raise UsageError(f"{name}: expected a list of numbers, got {given!r}. {advice}")
    return frozenset(given)


def min_score_of(options: ReadOptions) -> int | None:
    """The option `min_score`; None if it is not given."""
    given = options.options.get("min_score")
    if given is not None and not isinstance(given, int):
        raise UsageError(f"min_score: expected a number, got {given!r}. Write min_score = 3.")
    return given


def surrogate_in(text: str) -> bool:
    """Whether a text has half a surrogate pair, and so cannot be UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _text(row: Mapping[str, object], key: str) -> tuple[str, str]:
    value = look_up(row, key)
    if isinstance(value, bytes):  # of a binary column, or a text column with bytes that are no text
        try:
            return strip_turn_marks(value.decode()), ""
        except UnicodeDecodeError as error:
            return value[:_SHOWN].decode("utf-8", "replace"), f"not UTF-8: {error.reason} at byte {error.start}"
    if isinstance(value, str):
        return strip_turn_marks(value), ""
    got = "nothing" if value is None and key not in row else "null" if value is None else type(value).__name__
    if got == "nothing" and isinstance(row, dict) and row:  # a row of a table has its own columns checked before
        names = [str(name)[:40] for name in row]
        got += f" among {', '.join(names[:8])}" + (" …" if len(names) > 8 else "")
    return "", f"expected a string under {key!r}, got {got}"


def _conversation(row: Mapping[str, object], key: str) -> tuple[str, str]:
    turns = look_up(row, key)
    if not isinstance(turns, list) or not turns:
        return "", f"expected a list of messages under {key!r}, got {type(turns).__name__ if turns else 'none'}"
    told = []
    for index, turn in enumerate(turns):
        role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        if not isinstance(role, str) or not isinstance(content, str):
            return "", f"expected a role and a content, two strings, in message {index} under {key!r}"
        told.append((RESPONSE_MARK if role in _LEARNT_ROLES else PROMPT_MARK) + strip_turn_marks(content))
    return "".join(told), ""
