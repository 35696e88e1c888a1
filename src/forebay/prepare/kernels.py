"""Compiles the kernels that a recipe needs before its tasks start: groups of stages at once, each in a process.

A group is a small preparation that calls its kernels. A file beside the compiled code says that this was done, so that
later runs know it.
"""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forebay.errors import ForebayError
from forebay.prepare.compiled import kernel_directory
from forebay.prepare.dedup.methods import KINDS, Dedup
from forebay.prepare.documents import Stage
from forebay.prepare.engines.base import Notify
from forebay.prepare.engines.local import LocalEngine
from forebay.prepare.filters.language import LanguageStage
from forebay.prepare.recipe import Recipe
from forebay.prepare.tasks.stages import is_quick

_PAGE_FORMATS = {"html", "warc"}
_ON: Any = True
_is_compiling = False  # In a process that compiles a group.


@dataclass(frozen=True)
class KernelGroup:
    """Stages whose kernels share functions, or a method of deduplication."""

    names: tuple[str, ...]
    stages: tuple[Stage, ...] = ()
    dedup: Dedup = field(default_factory=Dedup)

    def load(self) -> None:
        """Import what compiles before processes are forked."""
        from forebay.prepare.dispatcher import refresh

        refresh()


def missing_groups(recipe: Recipe, formats: Collection[str]) -> list[KernelGroup]:
    """Return the groups of a recipe that were not compiled yet; none where compiled code cannot be kept.

    Stages of others, and those whose models take long to load, are left out; so is `extract` without a format of pages.
    """
    directory = kernel_directory()
    if _is_compiling or not directory:
        return []
    has_pages = not _PAGE_FORMATS.isdisjoint(formats)
    stages = [s for s in recipe.stages if is_quick((s,)) and (s.name != "extract" or has_pages)]
    stages = [stage for stage in stages if not _ready(stage.name).exists()]
    kinds = [kind for kind in KINDS if getattr(recipe.dedup, kind) and not _ready(kind).exists()]
    words = tuple(stage for stage in stages if isinstance(stage, LanguageStage))
    groups = [*filter(None, [words]), *((stage,) for stage in stages if stage not in words)]
    return [
        *(KernelGroup(tuple(stage.name for stage in group), group) for group in groups),
        *(KernelGroup((kind,), dedup=Dedup(**{kind: _ON})) for kind in kinds),
    ]


def compile_groups(
    prepare: Callable[..., Any],
    groups: Sequence[KernelGroup],
    workers: int,
    on_done: Callable[[int, float], None],
    notify: Notify,
) -> None:
    """Compile the kernels of groups, in up to `workers` processes; `on_done` gets a group's number and CPU seconds.

    `prepare` is `prepare_dataset`.
    """
    with _Compilers(workers, on_message=notify) as engine:
        engine.map(partial(_compile, prepare), groups, on_done)


class _Compilers(LocalEngine):
    _runs_tasks_here = False  # Each preparation has a record of its progress in its thread.


def _ready(name: str) -> Path:
    return Path(kernel_directory(), f"{name}.ready")


def _compile(prepare: Callable[..., Any], group: KernelGroup, scale: int) -> float:
    global _is_compiling
    _is_compiling, started = True, sum(os.times()[:4])
    text, ending = f"{Path(__file__).read_text()}\nPersonal data: someone@example.org\n", "txt"
    if group.names == ("extract",):
        text, ending = f"<html><body><p>{text.replace(chr(10) * 2, '</p><p>')}</p></body></html>", "html"
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "in")
        folder.mkdir()
        for number in range(3):
            folder.joinpath(f"{number}.{ending}").write_text(text)
        recipe = replace(Recipe(), stages=group.stages, dedup=group.dedup)
        with suppress(ForebayError):  # It fails again where it matters, and some stages drop all of it.
            prepare(folder, f"{temporary}/out", recipe=recipe, to="report", workers=1)
    for name in group.names:
        with suppress(OSError):
            _ready(name).touch()
    return sum(os.times()[:4]) - started
