"""Compiles the kernels that a recipe needs before its tasks start: groups of stages at once, each in a process.

A group is a recipe, of a small preparation that calls its kernels. Files beside the compiled code say that this was
done, so that later runs know it.
"""

import gc
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forebay.errors import ForebayError
from forebay.prepare.compiled import kernel_directory
from forebay.prepare.dedup.methods import KINDS, Dedup
from forebay.prepare.engines.base import Notify
from forebay.prepare.engines.local import LocalEngine
from forebay.prepare.filters.language import LanguageStage
from forebay.prepare.recipe import STAGES, Recipe

KERNEL_STAGES = STAGES.keys() - {"perplexity", "decontaminate", "select", "subset", "repeat"}
"""The stages that are compiled beforehand. The others have no kernels, or need files that only their settings name."""
_PAGE_FORMATS = {"html", "warc"}
_ON: Any = True
_is_compiling = False  # While a group is compiled.


def missing_groups(recipe: Recipe, formats: Collection[str]) -> list[Recipe]:
    """Return the groups of a recipe that were not compiled yet; none where compiled code cannot be kept.

    They contain Forebay's own stages, `extract` with a format of pages only. The filters that cut words share most of
    their functions, and are one group.
    """
    if _is_compiling or not kernel_directory():
        return []
    stages = [stage for stage in recipe.stages if stage.name in KERNEL_STAGES and not _ready(_name(stage)).exists()]
    if _PAGE_FORMATS.isdisjoint(formats):
        stages = [stage for stage in stages if stage.name != "extract"]
    words = tuple(stage for stage in stages if isinstance(stage, LanguageStage))
    groups = [*filter(None, [words]), *((stage,) for stage in stages if stage not in words)]
    kinds = [kind for kind in KINDS if getattr(recipe.dedup, kind) and not _ready(kind).exists()]
    return [
        *(Recipe(name=" ".join(map(_name, group)), stages=group) for group in groups),
        *(Recipe(name=kind, dedup=Dedup(**{kind: _ON})) for kind in kinds),
    ]


def compile_groups(
    prepare: Callable[..., Any],
    groups: Sequence[Recipe],
    workers: int,
    on_done: Callable[[int, float], None],
    notify: Notify,
    on_tick: Callable[[], None],
) -> None:
    """Compile the kernels of groups, in up to `workers` processes; `on_done` gets a group's number and CPU seconds.

    `prepare` is `prepare_dataset`; `on_tick` is called about once a second.
    """
    from forebay.prepare.dispatcher import refresh

    refresh()  # once, before processes are forked
    with LocalEngine(workers, on_message=notify) as engine:
        engine.on_tick = on_tick
        engine.map(partial(_compile, prepare), groups, on_done)


def _name(stage: Any) -> str:
    """Return the name of a stage's kernels: `pii` has others where it finds no numbers but addresses."""
    return "pii-addresses" if stage.name == "pii" and not stage.finds_numbers else str(stage.name)


def _ready(name: str) -> Path:
    return Path(kernel_directory(), f"{name}.ready")


def _compile(prepare: Callable[..., Any], group: Recipe, scale: int) -> float:
    global _is_compiling
    _is_compiling, started = True, sum(os.times()[:4])
    text, ending = f"{Path(__file__).read_text()}\nPersonal data: someone@example.org\n", "txt"
    if group.name == "extract":
        text, ending = f"<html><body><p>{text.replace(chr(10) * 2, '</p><p>')}</p></body></html>", "html"
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "in")
        folder.mkdir()
        for number in range(3):
            folder.joinpath(f"{number}.{ending}").write_text(text)
        gc.disable()  # It would walk through numba's trees of code again and again.
        try:
            prepare(folder, f"{temporary}/out", recipe=group, to="report", workers=1)
        except ForebayError:  # It fails again where it matters, and some stages drop all of it.
            pass
        finally:
            _is_compiling = False
            gc.enable()
    for name in group.name.split():
        with suppress(OSError):
            _ready(name).touch()
    return sum(os.times()[:4]) - started
