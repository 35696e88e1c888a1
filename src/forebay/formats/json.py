"""JSON files: the objects of a list, or one after the other; memory is bounded by the largest object.

Also TOML files that describe requests to a JSON API: `forebay prepare` fetches what they name as JSON lines.
"""

import re
from collections.abc import Iterator

from forebay.errors import CorruptInputError, UsageError
from forebay.formats.base import Format
from forebay.formats.inputs import InputSplit, ReadOptions, open_input
from forebay.formats.jsonl import Jsonl, object_record, values
from forebay.formats.records import Record
from forebay.formats.text import BOM


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
