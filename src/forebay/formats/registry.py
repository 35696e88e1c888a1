"""Every format by name: the built-in ones, and those of other packages (entry point group `forebay.formats`).

A format is imported when it is first used. Detection asks them in this order, those of other packages last, by name.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module

from forebay.errors import UsageError
from forebay.formats.base import Format
from forebay.plugins import load_plugin, plugins

ENTRY_POINTS = "forebay.formats"
BUILT_IN = {
    "megatron": "megatron:Megatron",
    "npy": "npy:Npy",
    "npz": "npy:Npz",
    "llm.c": "raw_tokens:LlmC",
    "parquet": "parquet:Parquet",
    "arrow": "arrow:Arrow",
    "orc": "orc:Orc",
    "safetensors": "safetensors:SafeTensors",
    "7z": "stackexchange:SevenZip",
    "images": "images:Images",
    "tfrecord": "tfrecord:TFRecord",
    "webdataset": "webdataset:WebDataset",
    "idx": "npy:Idx",
    "warc": "warc:Warc",
    "wet": "warc:Wet",
    "wikipedia": "wikipedia:Wikipedia",
    "stackexchange": "stackexchange:StackExchange",
    "reddit": "reddit:Reddit",
    "api": "json:ApiRequest",
    "jsonl": "jsonl:Jsonl",
    "json": "json:Json",
    "html": "html:Html",
    "raw tokens": "raw_tokens:RawTokens",
    "csv": "csv:Csv",
    "text": "text:Text",
    "lines": "text:Lines",
    "bin": "raw_tokens:Bin",
    "ds": "raw_tokens:Ds",
    "feather": "arrow:Feather",
    "forebay": "safetensors:ForebayDataset",
    "mds": "mds:Mds",
    "litdata": "litdata:LitData",
    "saved arrow": "arrow:SavedArrow",
}
"""Module (of this package) and class of each built-in format."""


def format_names() -> tuple[str, ...]:
    """Return the names of all formats, in the order of detection."""
    return (*BUILT_IN, *sorted(plugins(ENTRY_POINTS).keys() - BUILT_IN.keys()))


@cache
def get_format(name: str) -> Format:
    """Return a format by name. Raises UsageError if there is none, or it cannot be loaded."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        created: Format = getattr(import_module(f"forebay.formats.{module}"), attribute)()
        return created
    if name not in plugins(ENTRY_POINTS):
        raise UsageError(f"format: expected one of {', '.join(format_names())}, got {name!r}.")
    plugin = load_plugin(ENTRY_POINTS, name)()
    if not isinstance(plugin, Format) or plugin.name != name:
        raise UsageError(
            f"format {name}: expected a forebay.formats.base.Format of that name, got {type(plugin).__name__} "
            f"{getattr(plugin, 'name', '')!r}. Fix or uninstall its package."
        )
    return plugin


def formats(operation: str = "") -> Iterator[Format]:
    """Yield all formats, in the order of detection; only those with an operation (`read_text` …) if one is named."""
    for name in format_names():
        if not operation or get_format(name).supports(operation):
            yield get_format(name)


def names_with(operation: str) -> tuple[str, ...]:
    """Return the names of the formats that support an operation."""
    return tuple(entry.name for entry in formats(operation))
