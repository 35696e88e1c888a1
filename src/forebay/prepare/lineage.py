"""What a dataset was made of, and whether a run would make the same again."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.base import Json
from forebay.formats.inputs import InputFile, check_unchanged
from forebay.prepare.extend import parent_of
from forebay.prepare.inputs import InputFiles
from forebay.prepare.run import PrepareRun
from forebay.prepare.tasks import keys
from forebay.prepare.tokenize import tokenizers

INDEX_FILE = ".inputs.json"


def lineage_of(run: PrepareRun, sources: InputFiles, tokenizer: tokenizers.TokenizerFile | None) -> Json:
    """What a dataset was made of: the inputs, hashed or not, the recipe, the models and the versions."""
    recipe = run.recipe.to_json()
    recipe.pop("name")
    recipe["tokenize"]["sha256"] = tokenizer.sha256 if tokenizer else None
    if tokenizer:
        recipe["tokenize"]["tokenizer"] = tokenizer.description
    return {
        "inputs": [
            {"name": s.name, "bytes": s.bytes, "sha256": s.sha256, "format": s.format_read} for s in sources.files
        ],
        "recipe": recipe,
        "models": [sha256 for _, sha256 in keys.stage_files(run.recipe.stages)],
        "versions": keys.versions({s.format for s in sources.files}, run.recipe.stages),
        **parent_of(run.parent),
    }


def with_hashes(run: PrepareRun, sources: InputFiles, lineage: Json, sha256s: Mapping[str, str]) -> Json:
    """The lineage with the hash of each input's content; what is not in `sha256s` yet is hashed by the engine.

    The hashes are kept in the output by `source_key`, so that no later run reads a file for that again.
    """
    hashable = [source for source in sources.files if keys.has_content(source)]
    names = {source.path: keys.source_key(source) for source in hashable}
    try:
        before = json.loads(run.store.read(INDEX_FILE))
    except (OSError, ValueError):
        before = {}
    index = {name: str(before[name]) for name in names.values() if name in before}
    index |= {names[path]: sha256 for path, sha256 in sha256s.items() if path in names}
    missing = [source for source in hashable if names[source.path] not in index and not source.is_listed]
    hashed = run.map(hash_unchanged, [HashTask(s) for s in missing], weights=[s.bytes for s in missing])
    index |= {names[source.path]: sha256 for source, sha256 in zip(missing, hashed)}
    if index != before:
        with contextlib.suppress(OSError):  # A finished dataset may be read-only.
            run.store.write(INDEX_FILE, json.dumps(index, sort_keys=True).encode())
    inputs = [
        {**entry, "sha256": index.get(names.get(source.path, ""), entry["sha256"])}
        for source, entry in zip(sources.files, lineage["inputs"])
    ]
    return {**lineage, "inputs": inputs}


def is_same(run: PrepareRun, sources: InputFiles, theirs: Mapping[str, Any], lineage: Json) -> bool:
    """Whether a dataset of that lineage was made of the same inputs by the same recipe."""
    ours = [{**entry, "sha256": ""} for entry in lineage["inputs"]]
    if [{**entry, "sha256": ""} for entry in theirs.get("inputs", ())] != ours:
        return False
    if any(theirs.get(key) != lineage.get(key) for key in ("recipe", "models", "parent")):
        return False
    if theirs["inputs"] != with_hashes(run, sources, lineage, {})["inputs"]:
        return False
    old, new = theirs.get("versions", {}), lineage["versions"]
    changes = [f"{key} {value} (here: {new.get(key, 'none')})" for key, value in old.items() if new.get(key) != value]
    if changes:
        run.on_message(
            f"{run.store.url}: was made with other versions: {', '.join(changes)}. It is kept; remove it to make it "
            "again."
        )
    return True


@dataclass(frozen=True)
class HashTask:
    """A source to hash."""

    source: InputFile

    @property
    def name(self) -> str:
        """What tells the source from others, and from itself after a change."""
        return keys.source_key(self.source)


def hash_unchanged(task: HashTask, scale: int) -> str:
    """The SHA-256 of the source."""
    check_unchanged(task.source)
    sha256 = keys.hash_source(task.source)
    check_unchanged(task.source)
    return sha256
