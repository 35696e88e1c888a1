"""Requests to a JSON API: TOML files that `forebay prepare` downloads as JSON lines."""

import re
from collections.abc import Iterator

from forebay.errors import UsageError
from forebay.formats.base import Format
from forebay.formats.inputs import InputSplit, ReadOptions
from forebay.formats.records import Record


class ApiRequest(Format):
    """A request to a JSON API. Reading it as text raises: it has to be fetched first."""

    name = "api"
    suffixes = (".api.toml",)

    def sniff(self, head: bytes) -> bool:
        return (
            re.search(rb"(?m)^(?:url|preset)\s*=\s*\"", head) is not None
            and re.search(rb"(?m)^(?:preset|items|next)\s*=\s*\"", head) is not None
        )

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        path = split.files[0].path
        raise UsageError(
            f"{path}: describes an API, and not data. Name it NAME.api.toml, then run `forebay prepare NAME.api.toml`."
        )
