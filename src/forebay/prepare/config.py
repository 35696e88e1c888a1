"""Loads recipes: a shipped one, a user's TOML file and single settings, each laid over the one before.

An error names the file and the key: `mine.toml: dedup.bands: expected at least 1, got 0`. A table of a
stage (`[gopher_quality]`) switches the stage on; stages run in the order of their tables, and `[[length]]` twice is
that stage twice.
"""

import dataclasses
import functools
import inspect
import json
import operator
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from forebay.base import Json
from forebay.errors import ForebayError, MissingPackageError, UsageError, did_you_mean, listed, unknown_name
from forebay.plugins import check_code, load_plugin, plugins
from forebay.prepare.dedup.methods import KINDS, Method
from forebay.prepare.documents import Stage
from forebay.prepare.recipe import GROUPS, STAGES, Recipe
from forebay.prepare.scores.base import SCORERS, Score
from forebay.prepare.scores.columns import Select
from forebay.prepare.settings import Code, field_types, fit, plain
from forebay.toml import read_toml
from forebay.units import parse_size

Keys = tuple[str | int, ...]  # Keys from the outermost table in; a number is that of a table in an array of tables.
_SHIPPED = resources.files("forebay.prepare") / "recipes"


_ADDED = ("select", "subset")  # Tables that are never laid over an earlier one: each is about a column of its own.
Layer = tuple[str, Mapping[str, Any]]  # One source of settings: its file, "" for the command line, and its tables.


class _SettingError(Exception):
    def __init__(self, path: Keys, message: str) -> None:
        super().__init__(message)
        self.path = path


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(f.name.removesuffix(".toml") for f in _SHIPPED.iterdir() if f.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """The file of a shipped recipe, to copy and change."""
    return str(_SHIPPED.joinpath(f"{name}.toml").read_text("utf-8"))


def load_recipe(
    name: str | Path | None = None,
    config: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    allow_code: bool = False,
) -> Recipe:
    """A recipe: the shipped one of that name, changed by a file's tables, changed by single settings.

    Args:
        name: One of `recipe_names()`; a TOML file is a `config`.
        config: A TOML file. Its tables are laid over the recipe's, key by key.
        settings: The same as nested tables: what the command line says.
        allow_code: Whether `use` (a stage of your own) and `tokenizer = "module:Name"` may import
            what they name, and run it.

    Raises:
        UsageError: If a file is missing or no TOML, or a key or value is invalid: with file and key.
    """
    layers: list[Layer] = []
    if isinstance(name, Path) or str(name).endswith(".toml"):
        name, config = None, config or name
    if allow_code:  # as torchrun and pytest do: where the recipe is, and where the command runs
        folders = [str(Path(config).resolve().parent)] if config is not None else []
        sys.path[:0] = [path for path in (*folders, str(Path.cwd())) if path not in sys.path]
    if name is not None:
        if name not in recipe_names():
            raise unknown_name("recipe", recipe_names(), name)
        layers.append((f"{name}.toml", tomllib.loads(recipe_text(name))))
    if config is not None:
        layers.append((str(config), read_toml(config)))
    return _build_recipe([*layers, ("", settings or {})], Recipe(), allow_code)


def apply_settings(
    recipe: Recipe, settings: Sequence[Mapping[str, Any]], filters: Sequence[str | Stage], dedup: Sequence[str | Method]
) -> Recipe:
    """The recipe with nested settings laid over it, None being no setting, and with more stages and methods."""
    layers: list[Layer] = [("", without_none(tables)) for tables in settings]
    for name in filters:
        if isinstance(name, str):
            has_code = ":" in name
            stages = [(name.rpartition(":")[2], {"use": name})] if has_code else [(n, {}) for n in stage_group(name)]
            layers += [("", {stage: table}) for stage, table in stages]
    for kind in dedup:
        if isinstance(kind, str):
            table = {kind.rpartition(":")[2]: {"use": kind}} if ":" in kind else {check_method(kind): True}
            layers.append(("", {"dedup": table}))
    recipe = _build_recipe(layers, recipe, True)
    own = tuple(item for item in dedup if not isinstance(item, str))
    objects = tuple(item for item in filters if not isinstance(item, str))
    return dataclasses.replace(_with_methods(recipe, own), stages=(*recipe.stages, *objects))


def _with_methods(recipe: Recipe, own: Sequence[Method]) -> Recipe:
    """The recipe with more methods of deduplication."""
    return dataclasses.replace(recipe, dedup=dataclasses.replace(recipe.dedup, own=(*recipe.dedup.own, *own)))


def stage_group(name: str) -> tuple[str, ...]:
    """The names of stages that a name of `--filter` stands for. Raises UsageError for an unknown one."""
    if name in GROUPS:
        return GROUPS[name]
    if name not in STAGES and name not in plugins("forebay.filters"):
        raise unknown_name("filters", [*GROUPS, *STAGES], name)
    return (name,)


def check_method(name: str) -> str:
    """Return the name of a deduplication method. Raises UsageError for an unknown one."""
    if name not in (names := [*KINDS, *plugins("forebay.dedup")]):
        raise unknown_name("dedup", names, name)
    return name


def without_none(tables: Mapping[str, Any]) -> Json:
    """Return nested tables without the settings that are None."""
    present = {key: value for key, value in tables.items() if value is not None}
    return {key: without_none(value) if isinstance(value, Mapping) else value for key, value in present.items()}


def merge(below: Any, above: Any) -> Any:
    """Nested tables with those of `above` laid over them, key by key."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **{key: merge(below.get(key), value) for key, value in above.items()}}
    return above


def _location(layers: Sequence[tuple[str, Any]], path: Any) -> str:
    """`file: ` of the setting of the last layer, or of the nearest table around it; "" on the command line."""
    for length in range(len(path), 0, -1):
        for file, tables in reversed(layers):
            with suppress(LookupError, TypeError):
                functools.reduce(operator.getitem, path[:length], tables)
                return f"{file}: " if file else ""
    return ""


def _build_recipe(layers: Sequence[Layer], base: Recipe, allow_code: bool) -> Recipe:
    merged: Json = {}
    for _, tables in layers:
        merged = merge(merged, tables)
    try:
        return _recipe(merged, base, allow_code)
    except _SettingError as error:
        text = str(error).rstrip(".")
        raise UsageError(
            f"{_location(layers, error.path)}{'.'.join(part for part in error.path if isinstance(part, str))}: {text}"
            f"{'.' * (text[-1:] != '?')}"
        ) from error


def _recipe(tables: Mapping[str, Any], base: Recipe, allow_code: bool) -> Recipe:
    settings: Json = {}
    stages = list(base.stages)
    names = {f.name for f in dataclasses.fields(Recipe)} - {"stages"}
    for name, value in tables.items():
        each = value if isinstance(value, list) else [value]
        if name in names:
            settings[name] = value
        elif name == "score":
            stages = _scored(value, stages, allow_code)
        elif (
            name in STAGES
            or name in plugins("forebay.filters")
            or any(isinstance(t, Mapping) and "use" in t for t in each)
        ):
            before = [stage for stage in stages if stage.name.partition(".")[0] == name]
            if name in _ADDED and value is not False:
                before = []
            if before and (value is False or value is not each):
                stages = [stage for stage in stages if stage not in before]
            for index, table in enumerate(each):
                path: Keys = (name, index) if each is value else (name,)
                if table is not False:
                    stages.append(_stage(name, {} if table is True else table, path, allow_code, before))
        else:
            if tables_with_key := list(_tables_with_key(name)):
                raise _SettingError((name,), f"unknown key. It is one of {', '.join(tables_with_key)}")
            raise _unknown_key((name,), [*names, "score", *STAGES])
    settings["dedup"], own = _own_methods(settings.get("dedup", {}), allow_code)
    recipe: Recipe = _build(Recipe, settings, (), base, allow_code)
    return dataclasses.replace(_with_methods(recipe, own), stages=tuple(stages))


def _scored(tables: Any, stages: Sequence[Stage], allow_code: bool) -> list[Stage]:
    """The stages with those of `[score.NAME]` tables: a scorer each, and after it what selects by its column."""
    if not isinstance(tables, Mapping) or not all(isinstance(t, Mapping) or t is False for t in tables.values()):
        raise _SettingError(("score",), f"expected tables [score.NAME], got {tables!r}")
    out = list(stages)
    for column, table in tables.items():
        path: Keys = ("score", column)
        names = [stage.name for stage in out]
        index = names.index(f"score.{column}") if f"score.{column}" in names else len(out)
        stop = index + 1 + (names[index + 1 : index + 2] == [f"select.{column}"])
        before = [stage for stage in out[index:stop] if isinstance(stage, Score)]
        old_select = out[index + 1 : stop]
        out[index:stop] = []
        if table is False:
            continue
        use = str(table.get("use") or (before[0].use if before else ""))
        if use not in SCORERS and use not in plugins("forebay.scorers") and ":" not in use:
            raise _SettingError((*path, "use"), f"expected one of {', '.join(SCORERS)} or module:Name, got {use!r}")
        cls = _load_class("forebay.scorers", use, SCORERS, "a scorer", path, allow_code)
        if not hasattr(cls, "score"):
            raise _SettingError((*path, "use"), f"expected the class of a scorer, with a method score, got {use!r}")
        own = field_types(cls)
        selects = {key: value for key, value in table.items() if key in field_types(Select) and key not in own}
        settings = {key: value for key, value in table.items() if key != "use" and key not in selects}
        base = before[0].scorer if before and type(before[0].scorer) is cls else None
        scorer = _build(cls, settings, path, base, allow_code)
        try:
            out.insert(index, Score(column, use, scorer))
        except UsageError as error:
            raise _SettingError(path, str(error).partition(": ")[2]) from error
        if selects:
            old_select = [_build(Select, {"column": column, **selects}, path)]
        out[index + 1 : index + 1] = old_select
    return out


def _own_methods(table: Any, allow_code: bool) -> tuple[Any, list[Method]]:
    if not isinstance(table, Mapping):
        return table, []
    names = [name for name, value in table.items() if isinstance(value, Mapping)]
    names += [name for name, value in table.items() if value is True and name in plugins("forebay.dedup")]
    own: list[Method] = []
    for name in names:
        settings = {} if table[name] is True else table[name]
        path: Keys = ("dedup", name)
        cls = _load_class("forebay.dedup", settings.get("use", name), {}, "a deduplication method", path, allow_code)
        own.append(_build(cls, {key: value for key, value in settings.items() if key != "use"}, path, None, allow_code))
    return {key: value for key, value in table.items() if key not in names}, own


def _load_class(group: str, target: Any, built_in: Mapping[str, str], what: str, path: Keys, allow_code: bool) -> Any:
    try:
        cls = load_plugin(group, str(target), built_in, allow_code=allow_code)
    except MissingPackageError:
        raise
    except UsageError as error:
        raise _SettingError((*path, "use"), str(error)) from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise _SettingError((*path, "use"), f"expected the class of {what}, a dataclass, got {target!r}")
    return cls


def _stage(name: str, table: Any, path: Keys, allow_code: bool, before: Sequence[Stage]) -> Stage:
    if not isinstance(table, Mapping):
        raise _SettingError(path, f"expected a table of settings, true or false, got {table!r}")
    target = name if name in STAGES else table.get("use", name)
    cls = _load_class("forebay.filters", target, STAGES, "a stage", path, allow_code)
    settings = {key: value for key, value in table.items() if key != "use" or name in STAGES}
    base = before[0] if len(before) == 1 and type(before[0]) is cls else None
    stage: Stage = _build(cls, settings, path, base, allow_code)
    return stage


def _tables_with_key(key: str) -> Iterator[str]:
    """Yield `TABLE.KEY` for each table of a recipe that has this key."""
    for name, kind in field_types(Recipe).items():
        if any(key in getattr(choice, "__dataclass_fields__", ()) for choice in _choices(kind)):
            yield f"{name}.{key}"
    for name in STAGES:
        with suppress(UsageError):  # Its packages are not installed.
            if key in field_types(load_plugin("forebay.filters", name, STAGES)):
                yield f"{name}.{key}"


def _choices(kind: Any) -> Sequence[Any]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _unknown_key(path: Keys, names: Sequence[str]) -> _SettingError:
    return _SettingError(
        path, f"unknown key.{did_you_mean(path[-1], names) or f' There are {listed(sorted(names)) or None}'}"
    )


def _build(cls: Any, table: Any, path: Keys, base: Any = None, allow_code: bool = False) -> Any:
    if not isinstance(table, Mapping):
        raise _SettingError(path, f"expected a table of settings, got {table!r}")
    types_of = field_types(cls)
    values, nested = {}, {}
    for key, value in table.items():
        if key not in types_of:
            raise _unknown_key((*path, key), list(types_of))
        kind = next((kind for kind in _choices(types_of[key]) if dataclasses.is_dataclass(kind)), None)
        if kind is not None:
            nested[key] = _build(kind, value, (*path, key), getattr(base, key, None), allow_code)
        elif isinstance(value, Mapping) and typing.get_origin(types_of[key]) is tuple:
            values[key] = _pairs(value)
        else:
            values[key] = _number(types_of[key], value, (*path, key)) if isinstance(value, str) else value
    try:
        for key, value in values.items():
            if types_of[key] == Code:
                check_code(str(value), allow_code, f"{key}: ")
        fitted = {key: fit(types_of[key], value, key) for key, value in values.items()}
        return cls(**fitted, **nested) if base is None else dataclasses.replace(base, **fitted, **nested)
    except ForebayError as error:
        key, _, message = str(error).partition(": ")
        if key in types_of:
            raise _SettingError((*path, key), message) from error
        raise _SettingError(path, str(error)) from error


def _pairs(value: Any) -> Any:
    """A table as the list of its keys and values, within it too."""
    return [[key, _pairs(item)] for key, item in value.items()] if isinstance(value, Mapping) else value


def _number(kind: Any, value: str, path: Keys) -> Any:
    kind = kind.__origin__ if typing.get_origin(kind) is Annotated else kind
    if kind is int and "bytes" in str(path[-1]):
        try:
            return parse_size(value)
        except UsageError as error:
            raise _SettingError(path, f"expected a size such as 64MiB, got {value!r}") from error
    if kind is float and (number := re.fullmatch(r"-?inf|([\d.]+)%", value)):
        return float(number[1]) / 100 if number[1] else float(value)
    return value


def describe(name: str) -> str:
    """The description of a recipe's table: what it does, and its keys with their defaults."""
    tables = field_types(Recipe)
    scorer = name.removeprefix("score.")
    if name in STAGES or name in plugins("forebay.filters"):
        cls = load_plugin("forebay.filters", name, STAGES)
    elif scorer != name and (scorer in SCORERS or scorer in plugins("forebay.scorers")):
        cls = load_plugin("forebay.scorers", scorer, SCORERS)
    else:
        owners = [key for key in _tables_with_key(name.rpartition(".")[2]) if name in (key, key.partition(".")[2])]
        if owners and name not in tables:
            return f"keys: {', '.join(owners)}\n\n{describe(owners[0].partition('.')[0])}"
        choices = [kind for kind in _choices(tables.get(name)) if dataclasses.is_dataclass(kind)]
        if not choices:
            names = [*(n for n in tables if n != "stages"), *STAGES, *(f"score.{n}" for n in SCORERS)]
            raise unknown_name("recipe, or a table of one", [*recipe_names(), *names], name)
        cls = choices[0]
    lines = [f"[{name}]", "", inspect.cleandoc(cls.__doc__ or ""), ""]
    for item in dataclasses.fields(cls):
        if item.init and item.default is not dataclasses.MISSING and item.name != "own":
            default = plain(item.default)
            lines.append(f"{item.name} = {'(none)' if default is None else json.dumps(default, ensure_ascii=False)}")
    return "\n".join(lines)
