"""Files that run Forebay elsewhere: Slurm, Kubernetes, Docker Compose, systemd, from the templates beside this module.

Each setting has a pattern, so that no value changes the structure of a file. Texts without one, the command's words
above all, are quoted for the language that reads them: the filters `yaml`, `shell` and `unit`.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from forebay.errors import UsageError, printable, unknown_name
from forebay.files import atomic_write


@dataclass(frozen=True)
class Setting:
    """A setting of a kind of files: its default (None: it is required), what it must match, and its description."""

    default: str | None
    pattern: str
    about: str
    is_path: bool = False  # Relative to the file in the file, and to the present directory for the user.


@dataclass(frozen=True)
class Kind:
    """A kind of files: its settings, what to do with the files, and whether they need a command."""

    settings: Mapping[str, Setting]
    next_steps: Sequence[str]
    needs_command: bool = False


KINDS = {
    name: Kind({key: Setting(*parts) for key, parts in kind.pop("settings").items()}, **kind)
    for name, kind in json.loads(Path(__file__).with_name("kinds.json").read_bytes()).items()
}
"""By name, from `kinds.json`: of a setting its default, what its value must match, and its description."""


def render(kind: str, values: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """The files of a kind, text by name, filled in with these settings, else with defaults.

    Raises:
        UsageError: If a setting or its value is not valid, or the kind needs a command and there is none.
    """
    import jinja2

    settings = KINDS[kind].settings
    for key, value in values.items():
        if key not in settings:
            raise unknown_name(f"launch {kind}: --set", settings, key)
        setting = settings[key]
        if not re.fullmatch(setting.pattern, value) or not value.isprintable():
            form = "printable text" if setting.pattern in (".+", ".*") else setting.pattern
            raise UsageError(
                f"launch {kind}: {key} ({setting.about}): expected {form}, got {value!r:.100}. Correct it."
            )
    if KINDS[kind].needs_command and not command:
        raise UsageError(f"launch {kind}: expected a command, got none. Give one behind --, such as -- python train.py")
    if any(re.search("[\0\ud800-\udfff]", word) for word in command):
        raise UsageError(f"launch {kind}: expected a command of text, got a NUL byte or bytes that are not UTF-8.")
    filled = {key: setting.default for key, setting in settings.items()} | dict(values)
    if missing := [key for key, value in filled.items() if value is None]:
        about = settings[missing[0]].about
        raise UsageError(f"launch {kind}: expected {missing[0]} ({about}), got none. Give --set {missing[0]}=VALUE.")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"yaml": quote_yaml, "shell": shlex.quote, "unit": quote_unit}
    templates = sorted((files("forebay.launch") / "templates" / kind).iterdir(), key=lambda file: file.name)
    texts = {}
    for template in templates:
        text = environment.from_string(template.read_text("utf-8")).render(filled, command=command)
        texts[template.name.replace("NAME", str(filled["name"]))] = text
    return texts


def write(directory: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files into a directory and return their paths; equal files are written again.

    Raises UsageError, before anything is written, if a file exists with another text.
    """
    paths = [directory / name for name in texts]
    for path, text in zip(paths, texts.values()):
        if path.exists() and path.read_text("utf-8", errors="replace") != text:
            raise UsageError(
                f"launch: expected no file {path}, got one with another text. Remove it, or give another directory."
            )
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, texts.values()):
        atomic_write(path, text.encode())
    return paths


def quote_yaml(text: str) -> str:
    """A double-quoted scalar of YAML; `$$` is a `$` both in Compose files and in a pod's command."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", text.replace("$", "$$"))
    return f'"{printable(escaped)}"'


def quote_unit(text: str) -> str:
    """A word of a command in a systemd unit."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", text.replace("%", "%%").replace("$", "$$"))
    return f'"{escaped}"'
