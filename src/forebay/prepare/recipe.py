"""The recipe: everything that decides what a dataset is made of, from one TOML file.

Hides: how tables become frozen dataclasses, and where in the file a wrong key stands. Each table is one dataclass,
whose fields are its keys; a table of a stage (`[gopher_quality]`) switches the stage on, and stages run in the order
of their tables. `[[length]]` twice is that stage twice.
"""

import dataclasses
import difflib
import importlib
import inspect
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from forebay.errors import ForebayError, UsageError, install_command
from forebay.prepare.config import Keys, Layer, merge, parse_layer, place_of
from forebay.prepare.dedup.settings import Dedup
from forebay.prepare.documents import Stage, without_paths
from forebay.prepare.engines.sandbox import Limits
from forebay.prepare.read.base import ReadOptions
from forebay.prepare.settings import Positive, Settings, Share, field_types, fit
from forebay.prepare.subsets import Subsets
from forebay.prepare.tasks.slicing import MIN_SLICE_BYTES
from forebay.prepare.tokenize.conversations import TEMPLATES, Conversations
from forebay.units import parse_size

STAGES = {
    "extract": "forebay.prepare.clean.extract:Extract",
    "unicode": "forebay.prepare.clean.unicode:Unicode",
    "pii": "forebay.prepare.clean.pii:Pii",
    "toxic": "forebay.prepare.clean.toxic:Toxic",
    "boilerplate": "forebay.prepare.clean.boilerplate:Boilerplate",
    "url": "forebay.prepare.filters.url:Url",
    "length": "forebay.prepare.filters.length:Length",
    "gopher_quality": "forebay.prepare.filters.quality:GopherQuality",
    "gopher_repetition": "forebay.prepare.filters.quality:GopherRepetition",
    "c4": "forebay.prepare.filters.c4:C4",
    "code": "forebay.prepare.filters.code:Code",
    "fineweb": "forebay.prepare.filters.quality:FineWeb",
    "language": "forebay.prepare.filters.language:Language",
    "perplexity": "forebay.prepare.filters.perplexity:Perplexity",
}
GROUPS = {"gopher": ("gopher_repetition", "gopher_quality")}
"""Names that `--filter` takes for several stages."""


@dataclass(frozen=True)
class Tokenize:
    """`[tokenize]`: which tokenizer, and what stands between documents.

    Args:
        tokenizer: A tokenizer.json, a directory, a hub name, `bytes`, `train:VOCAB`, `tiktoken:NAME`.
        eos, bos: Whether the tokenizer's own end and beginning of text stand after and before each document, or the
            name of the token that does. `auto`: if the vocabulary has one.
    """

    tokenizer: str = ""
    eos: bool | str = "auto"
    bos: bool | str = False


@dataclass(frozen=True)
class Slicing(Settings):
    """`[slice]`: the size of slices and the order of documents in them.

    Args:
        bytes: No slice file is larger; all but the last are within 1 % of it, 64 KiB and up.
        tokens, rows: Tokens (or rows, with `[rows]`) in each slice but the last, instead of a size in bytes.
        shuffle: Documents are permuted over the whole dataset before they are cut into slices.
        seed: Of the permutation, and of the sample that `train:` learns from.
    """

    bytes: Annotated[int, Field(ge=MIN_SLICE_BYTES)] = 64 << 20
    tokens: Positive | None = None
    rows: Positive | None = None
    shuffle: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Rows(Settings):
    """`[rows]`: conversations to rows of one length, for fine-tuning, in place of a stream of tokens.

    Args:
        max_tokens: The length of a row.
        template: What stands around turns: `plain` or `chatml`.
        too_long: A longer conversation is `cut` at its end, or `drop`ped.
        labels: `I64`, as PyTorch wants it, or `I32`.
        packed: Several whole conversations share a row, told apart by `position_ids` and `segment_ids`.
    """

    max_tokens: Annotated[int, Field(ge=2)] = 2048
    template: Literal["plain", "chatml"] = "plain"
    too_long: Literal["cut", "drop"] = "cut"
    labels: Literal["I32", "I64"] = "I64"
    packed: bool = False

    def conversations(self) -> Conversations:
        return Conversations(self.max_tokens, TEMPLATES[self.template], self.too_long)


@dataclass(frozen=True)
class Recipe(Settings):
    """All that decides the bytes of a dataset. `inputs` are what is read if the command line names none."""

    inputs: tuple[str, ...] = ()
    name: str = ""
    max_bad: Share = 0.05
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    read: ReadOptions = field(default_factory=ReadOptions)
    limits: Limits = field(default_factory=Limits)
    stages: tuple[Stage, ...] = ()
    dedup: Dedup = field(default_factory=Dedup)
    tokenize: Tokenize = field(default_factory=Tokenize)
    slice: Slicing = field(default_factory=Slicing)
    subsets: Subsets = field(default_factory=Subsets)
    rows: Rows | None = None

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Between which percentiles of perplexity documents are kept; empty if that does not matter."""
        found = [getattr(stage, "keep_percentile", ()) for stage in self.stages]
        return next((pair for pair in found if pair), ())

    def to_json(self) -> dict[str, Any]:
        """Every setting, defaults too, as the lineage keeps it: `stages` is a list of [name, settings]."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("inputs", "stages")]
        found = {name: _plain(getattr(self, name)) for name in names}
        return {**found, "stages": [[s.name, _plain(without_paths(s))] for s in self.stages]}

    def to_tables(self) -> dict[str, Any]:
        """The same as the tables of a recipe's file, in their order: `load_recipe(settings=…)` takes them back."""
        found: dict[str, Any] = {"name": self.name, "max_bad": self.max_bad, "sample": self.sample}
        found["read"] = _plain(self.read)
        found["limits"] = _plain(self.limits)
        for stage in self.stages:
            target = f"{type(stage).__module__}:{type(stage).__qualname__}"
            use = {} if STAGES.get(stage.name) == target else {"use": target}
            held = found.get(stage.name, [])
            found[stage.name] = [*(held if isinstance(held, list) else [held]), {**use, **_plain(stage)}]
        found = {
            key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in found.items()
        }
        for name in ("dedup", "tokenize", "slice", "rows"):
            if getattr(self, name) is not None:
                found[name] = {k: v for k, v in _plain(getattr(self, name)).items() if v is not None}
        if self.subsets.fractions:
            found["subsets"] = {**dict(self.subsets.fractions), "salt": self.subsets.salt}
        return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [_plain(member) for member in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


_SHIPPED = resources.files("forebay.prepare") / "recipes"


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(f.name.removesuffix(".toml") for f in _SHIPPED.iterdir() if f.name.endswith(".toml"))


def load_recipe(
    name: str | None = None,
    config: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    allow_code: bool = False,
) -> Recipe:
    """A recipe: the shipped one of that name, changed by a file's tables, changed by single settings.

    Args:
        name: One of `recipe_names()`.
        config: A TOML file. Its tables are laid over the recipe's, key by key.
        settings: The same as nested tables: what the command line says.
        allow_code: Whether `use` (a stage of your own) and `toxic.classifier` may import what they name, and run it.

    Raises:
        UsageError: If a file is missing or no TOML, or a key or value cannot be: with file, line and key.
    """
    layers: list[Layer] = []
    if name is not None:
        if name not in recipe_names():
            raise UsageError(
                f"recipe {name!r}: expected one of {', '.join(recipe_names())}; a file goes with --config."
            )
        layers.append(parse_layer(_SHIPPED.joinpath(f"{name}.toml").read_bytes(), f"{name}.toml"))
    if config is not None:
        try:
            data = Path(config).read_bytes()
        except OSError as error:
            raise UsageError(f"{config}: cannot read the recipe: {error.strerror or error}.") from error
        layers.append(parse_layer(data, str(config)))
    layers.append(Layer("", dict(settings or {}), {}))
    return _build_recipe(layers, allow_code)


class _Problem(Exception):  # noqa: N818 - it never leaves this file
    """A wrong setting at a path of keys."""

    def __init__(self, path: Keys, message: str) -> None:
        super().__init__(message)
        self.path = path


def _unknown_key(path: Keys, known: Sequence[str]) -> _Problem:
    near = difflib.get_close_matches(str(path[-1]), known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known)) or 'none'}"
    return _Problem(path, f"unknown key; {hint}")


def _build_recipe(layers: Sequence[Layer], allow_code: bool) -> Recipe:
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer.tables)
    try:
        return _recipe(merged, allow_code)
    except _Problem as problem:
        key = ".".join(part for part in problem.path if isinstance(part, str))
        raise UsageError(f"{place_of(layers, problem.path)}{key}: {str(problem).rstrip('.')}.") from problem


def _recipe(tables: dict[str, Any], allow_code: bool) -> Recipe:
    plain: dict[str, Any] = {}
    stages: list[Stage] = []
    known = {f.name for f in dataclasses.fields(Recipe)} - {"stages"}
    for name, value in tables.items():
        listed = isinstance(value, list)
        if name in STAGES or any(isinstance(t, dict) and "use" in t for t in (value if listed else [value])):
            for index, table in enumerate(value if listed else [value]):
                path: Keys = (name, index) if listed else (name,)
                if table is not False:
                    _check_code(name, table, path, allow_code)
                    stages.append(_stage(name, {} if table is True else table, path))
        elif name in known:
            plain[name] = value
        else:
            raise _unknown_key((name,), [*known, *STAGES])
    subsets = plain.pop("subsets", {})
    recipe: Recipe = _build(Recipe, plain, ())
    recipe = dataclasses.replace(recipe, subsets=_subsets(subsets))
    return dataclasses.replace(recipe, stages=tuple(stages))


def _subsets(table: Any) -> Subsets:
    """`validation = 0.01`, and perhaps `salt = "…"`."""
    if not isinstance(table, dict):
        raise _Problem(("subsets",), f"expected a table of names and shares, got {table!r}")
    shares = {}
    for key, value in table.items():
        try:
            if key == "salt":
                fit(str, value, key)
                continue
            share = _number(float, value, ("subsets", key)) if isinstance(value, str) else value
            shares[key] = fit(float, share, key)
            Subsets.of({key: shares[key]})
        except UsageError as error:
            raise _Problem(("subsets", key), str(error).partition(": ")[2]) from error
    try:
        return Subsets.of(shares, table.get("salt", ""))
    except UsageError as error:
        raise _Problem(("subsets",), str(error)) from error


def _check_code(name: str, table: Any, path: Keys, allowed: bool) -> None:
    key = "classifier" if name in STAGES else "use"
    if isinstance(table, dict) and table.get(key) and not allowed:
        raise _Problem(
            (*path, key),
            f"names code, {table[key]!r}, which a recipe may run only with --allow-code (allow_code=True in Python). "
            "Read it first if the recipe is not yours",
        )


def _stage(name: str, table: Any, path: Keys) -> Stage:
    if not isinstance(table, dict):
        raise _Problem(path, f"expected a table of settings, true or false, got {table!r}")
    target = STAGES.get(name) or str(table.get("use", ""))
    module, _, attribute = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        if name in STAGES:
            raise UsageError(
                f"{name}: {error.name or error} is not installed. Install it: {install_command('prepare')}."
            ) from error
        raise _Problem((*path, "use"), f"cannot import {target!r}: {error}") from error
    except (AttributeError, ValueError, TypeError) as error:
        raise _Problem((*path, "use"), f"expected module:Class, got {target!r}") from error
    except Exception as error:
        raise _Problem((*path, "use"), f"cannot import {target!r}: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise _Problem((*path, "use"), f"expected the class of a stage, a dataclass, got {target!r}")
    return cast(Stage, _build(cls, {key: value for key, value in table.items() if key != "use"}, path))


def _choices(kind: Any) -> Sequence[Any]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _build(cls: Any, table: Any, path: Keys) -> Any:
    """The dataclass from a table, each value checked against its field's type."""
    if not isinstance(table, dict):
        raise _Problem(path, f"expected a table of settings, got {table!r}")
    types_of = field_types(cls)
    values, built = {}, {}
    for key, value in table.items():
        if key not in types_of:
            raise _unknown_key((*path, key), list(types_of))
        nested = next((kind for kind in _choices(types_of[key]) if dataclasses.is_dataclass(kind)), None)
        if nested is not None:
            built[key] = _build(nested, value, (*path, key))
        elif isinstance(value, dict) and typing.get_origin(types_of[key]) is tuple:
            values[key] = list(value.items())
        else:
            values[key] = _number(types_of[key], value, (*path, key)) if isinstance(value, str) else value
    try:
        return cls(**{key: fit(types_of[key], value, key) for key, value in values.items()}, **built)
    except ForebayError as error:
        key, _, message = str(error).partition(": ")
        if key in types_of:
            raise _Problem((*path, key), message) from error
        raise _Problem(path, str(error)) from error


def _number(kind: Any, value: str, path: Keys) -> Any:
    """The number that `64MiB`, `1%` or `inf` stands for, where a number is wanted."""
    kind = kind.__origin__ if typing.get_origin(kind) is Annotated else kind
    if kind is int and "bytes" in str(path[-1]):
        try:
            return parse_size(value)
        except UsageError as error:
            raise _Problem(path, f"expected a size such as 64MiB, got {value!r}") from error
    if kind is float and (number := re.fullmatch(r"-?inf|([\d.]+)%", value)):
        return float(number[1]) / 100 if number[1] else float(value)
    return value


def describe(name: str) -> str:
    """What a table of a recipe does, and its keys with their defaults, for people."""
    tables = field_types(Recipe)
    if name in STAGES:
        module, _, attribute = STAGES[name].partition(":")
        cls = getattr(importlib.import_module(module), attribute)
    else:
        choices = [kind for kind in _choices(tables.get(name)) if dataclasses.is_dataclass(kind)]
        if not choices:
            known = [*(n for n, t in tables.items() if n != "stages"), *STAGES]
            near = difflib.get_close_matches(name, [*known, *recipe_names()], 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"recipe {name!r}: expected a recipe or one of its tables: {', '.join(known)}.{hint}")
        cls = choices[0]
    lines = [f"[{name}]", "", inspect.cleandoc(cls.__doc__ or ""), ""]
    for one in dataclasses.fields(cls):
        if one.default is not dataclasses.MISSING:
            plain = _plain(one.default)
            lines.append(f"{one.name} = {'(none)' if plain is None else json.dumps(plain, ensure_ascii=False)}")
    return "\n".join(lines)


def recipe_text(name: str) -> str:
    """The file of a shipped recipe, to copy and change."""
    return str(_SHIPPED.joinpath(f"{name}.toml").read_text("utf-8"))


def parse_setting(text: str) -> dict[str, Any]:
    """`gopher_quality.min_words=20` as nested tables; the value is TOML, or else a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {text!r}: expected KEY=VALUE, such as gopher_quality.min_words=20.")
    try:
        found: Any = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        found = value.strip()
    for part in reversed(key.strip().split(".")):
        found = {part: found}
    return dict(found)
