"""Settings that fit their types: the fields of frozen dataclasses, checked by pydantic when one is created."""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from forebay.errors import UsageError, did_you_mean

Number = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Code = Annotated[str, "module:Name"]
"""The name of an object, which may be code: a recipe names it only with leave."""
Texts = tuple[Annotated[str, Field(min_length=1)], ...]

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "too_short": "more items",
    "too_long": "fewer items",
    "missing": "more items",
}
"""What a kind of error of pydantic's wanted, where it does not say it in our words."""
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


@cache
def field_types(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, with the ranges that are annotated."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))


def fit(kind: Any, value: Any, name: str) -> Any:
    """The value of the setting `name` as its type wants it: a list as a tuple, a whole number as a float."""
    try:  # As JSON, whose lists may be tuples.
        return _adapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        wrong = [item for item in error.errors() if item["type"] != "too_short"] or error.errors()
        expected = " or ".join(dict.fromkeys(map(requested, wrong)))
        hint = did_you_mean(wrong[0]["input"], re.findall("'([^']*)'", expected))
        raise UsageError(f"{name}: expected {expected}, got {wrong[0]['input']!r}{hint and '.' + hint}") from error


def requested(error: Any) -> str:
    """Return what an error of pydantic expected, in our words."""
    for key, words in _LIMITS.items():
        if (limit := error.get("ctx", {}).get(key)) is not None:
            return f"{words} {int(limit) if limit == int(limit) else limit}"
    return _EXPECTED.get(error["type"]) or str(error["msg"]).removeprefix("Input should be ")


def check_order(settings: object, low: str, high: str) -> None:
    """Raise UsageError if the field `low` is above the field `high`."""
    if getattr(settings, low) > getattr(settings, high):
        raise UsageError(f"{low}: expected at most {high} ({getattr(settings, high)}), got {getattr(settings, low)}")


class Settings:
    """A frozen dataclass whose fields are checked."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(settings: Any) -> None:
    """Check the fields of a dataclass that was just made; lists become tuples, so that it can be hashed.

    Defaults, and objects that no file can hold (a stage of one's own may have such), are taken as they are. The
    field that its class names in `required`, with what it has to be, may not be left empty.
    """
    cls: Any = type(settings)
    for item in dataclasses.fields(cls):
        value = getattr(settings, item.name)
        if value is item.default or not item.init:
            continue
        try:
            json.dumps(value)
        except TypeError:
            continue
        fitted = fit(field_types(cls)[item.name], value, item.name)
        if isinstance(fitted, tuple):
            object.__setattr__(settings, item.name, fitted)
    if required := getattr(cls, "required", None):
        name, what = required
        if not getattr(settings, name):
            raise UsageError(f"{name}: expected {what}, got none")


def plain(value: Any) -> Any:
    """A setting as JSON and TOML have it, with the `former` settings that ids of datasets still depend on."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            **getattr(value, "former", {}),
            **{f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)},
        }
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [plain(member) for member in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
