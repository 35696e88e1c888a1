"""JSON files: the objects of a list, or one after the other; memory is bounded by the largest object.

Also TOML files that describe requests to a JSON API: `forebay prepare` fetches what they name as JSON lines.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from forebay.errors import CorruptInputError, UsageError
from forebay.formats.base import Format
from forebay.formats.inputs import InputSplit, ReadOptions, open_input
from forebay.formats.jsonl import MAX_VALUES, Jsonl, object_record, too_many_values
from forebay.formats.records import Record
from forebay.formats.text import BOM

_STEP = 1 << 20
_BETWEEN = re.compile(r"[\s,\x1e\ufeff]*")


class Json(Format):
    """Files of JSON that are not lines."""

    name = "json"
    suffixes = (".json",)
    is_plain_text = True

    def sniff(self, head: bytes) -> bool:
        is_object = re.match(rb'[\s\x1e]*(\[\s*)?\{\s*("|$)', head.removeprefix(BOM)) is not None
        return is_object and not Jsonl().sniff(head)

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        """What cannot be parsed ends a file: nothing tells where the next object begins."""
        index = -1
        with open_input(split.files[0], options) as file:
            try:
                for index, value in enumerate(values(file, options.max_document_bytes)):
                    yield object_record(index, value, options, f"value {index}")
            except (ValueError, RecursionError, CorruptInputError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                yield Record(index + 1, problem=reason, location=f"value {index + 1}", unread=-1)


class ApiRequest(Format):
    """A request to a JSON API. Reading it as text raises: it has to be fetched first."""

    name = "api"
    suffixes = (".api.toml",)

    def sniff(self, head: bytes) -> bool:
        # A text may show such a file; this one begins as TOML does, after comments.
        return (
            re.match(rb"(?:[ \t\r]*(?:#[^\n]*)?\n)*[ \t]*(?:\[|[\w.-]+\s*=)", head.removeprefix(BOM)) is not None
            and re.search(rb"(?m)^(?:url|preset)\s*=\s*\"", head) is not None
            and re.search(rb"(?m)^(?:preset|items|next)\s*=\s*\"", head) is not None
        )

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        path = split.files[0].path
        raise UsageError(f"{path}: describes an API. Name it NAME.api.toml and run `forebay prepare` on it.")


def values(file: BinaryIO, limit: int) -> Iterator[object]:
    """Yield the values of JSON one after the other, and those in its lists. Raises ValueError where it is damaged."""
    decode, decoder = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8-sig")()
    text, offset, is_started, is_ended, in_list, failure = "", 0, False, False, False, ""
    while True:
        between = _BETWEEN.match(text, offset)
        assert between is not None  # It may be empty.
        offset = between.end()
        if not is_started and offset < len(text):
            is_started, in_list = True, text[offset] == "["
            offset += in_list
            continue
        if in_list and text[offset : offset + 1] == "]":
            is_started, in_list, offset = False, False, offset + 1
            continue
        if offset < len(text) and (is_ended or text[offset] in '{["'):
            try:
                value, offset = decode(text, offset)
                yield value
                continue
            except ValueError as error:
                failure = f"not JSON: {error}"
        elif offset < len(text) and len(text) - offset > 64:
            raise ValueError(f"not JSON: expected an object, got {text[offset : offset + 20]!r}")
        if is_ended:
            if (failure and offset < len(text)) or in_list:
                raise ValueError(failure or "not JSON: it ends early")
            return
        if failure and too_many_values(text[offset:].encode("utf-8", "replace")):
            raise ValueError(f"more than {MAX_VALUES} values in one object")
        if len(text) - offset > limit:
            raise ValueError(f"{failure}; or a value longer than max_document_bytes, {limit}")
        data = file.read(max(_STEP, len(text) - offset))
        is_ended = not data
        text, offset = text[offset:] + decoder.decode(data, is_ended), 0
