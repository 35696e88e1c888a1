"""The stage `decontaminate`: drops or cuts documents that hold instances of evaluation sets.

Two rules. `overlap`: of one field of an instance, or of all together, at least `min_ratio` of the words stand in
n-grams that the document has too. `ngram`: one n-gram is enough. Cost: one rolling hash a word, 60 to 120 MB/s a core,
and some 0.2 ms for each document that shares an n-gram.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from forebay.arrays import I64, U8
from forebay.errors import PrepareError, UsageError
from forebay.formats.inputs import ALL_FIELDS, ReadOptions
from forebay.prepare.clean.spans import replace_rows
from forebay.prepare.decontaminate.index import (
    EvaluationIndex,
    SetFiles,
    expand_ligatures,
    find_ngrams,
    flag_rows,
    open_index,
    set_names,
)
from forebay.prepare.dedup.kernels import character_table, hash_ngrams, locate_words, read_words
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column, text_buffers
from forebay.prepare.settings import Count, Json, Share, Texts, check_fields

_NGRAMS = {"overlap": 8, "ngram": 13}
_SHOWN_CHARACTERS = 300  # Of a matched n-gram.


@dataclass(frozen=True)
class Decontaminate(Stage):
    """Drop documents that hold instances of evaluation sets, or cut these out. `contamination.jsonl` lists each.

    Args:
        sets: Files and folders of any format that is read as text, and hub names (`hf://datasets/NAME:test`). A record
            is an instance.
        fields: Whose texts are looked for; empty: every field with text but the id and the URL. Lists and objects count
            with all their texts.
        method: `overlap`: a document is contaminated if it shares n-grams that cover `min_ratio` of the words of a
            field, or of all fields of an instance together. `ngram`: if it shares one n-gram.
        ngram: Words of an n-gram, after case, punctuation and accents are removed; 0: 8 for `overlap`, 13 for `ngram`.
            A field with fewer words is not looked for; the report counts instances that have none.
        min_ratio: Of `overlap`.
        action: `drop` the document; or `cut` the n-grams, and `margin` characters on both sides. A piece of fewer than
            `margin` characters goes too, and a document that would be left in more than `max_pieces`, or in none.
        margin, max_pieces: Of `cut`.
        id_key: The field with an instance's id, for the list; a record without has its file and line.
        format: Of the sets: a name, or `auto`.

    Source: overlap as in Tülu 3 (Lambert et al. 2024), 3.2: 8-grams, half of an instance's tokens. ngram, and cut, as
    in GPT-3 (Brown et al. 2020), appendix C: 13-grams, 200 characters, 10 pieces.
    """

    name = "decontaminate"
    version = 2
    required = ("sets", "files, folders or hub names of evaluation sets")
    sets: Texts = ()
    fields: Texts = ()
    method: Literal["overlap", "ngram"] = "overlap"
    ngram: Annotated[int, Field(ge=0, le=256)] = 0
    min_ratio: Share = 0.5
    action: Literal["drop", "cut"] = "drop"
    margin: Count = 200
    max_pieces: Annotated[int, Field(ge=1)] = 10
    id_key: str = "id"
    format: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        for entry in self.sets:
            if "://" not in entry and not Path(entry).exists():
                raise UsageError(
                    f"sets: expected files, folders or hub names, got {entry!r}, which does not exist. Check the path."
                )

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"contaminated_{name}" for name in set_names(self.sets))

    @property
    def ngram_words(self) -> int:
        return self.ngram or _NGRAMS[self.method]

    def files(self) -> tuple[str, ...]:
        """The files of the sets, and the index, which is built here."""
        listed: tuple[str, ...] = getattr(self, "_files", ())
        if listed and any("://" in entry for entry in self.sets):
            return listed  # without asking the hub again
        files = self._find()
        path = str(files.build())
        local = (file.path for source in files.files for file in source.files if "://" not in file.path)
        # Kept beside the fields, so that workers map this index and do not look for the sets again.
        object.__setattr__(self, "_index_path", path)
        object.__setattr__(self, "_files", listed := (*local, path))
        return listed

    def _find(self) -> SetFiles:
        options = ReadOptions(format=self.format, id_key=self.id_key, text_keys=self.fields or (ALL_FIELDS,))
        return SetFiles.find(self.sets, options, self.ngram_words)

    def index(self) -> EvaluationIndex:
        """The index of the sets; built where it is missing, as on another machine."""
        path = getattr(self, "_index_path", "")
        if not path or not Path(path).exists():
            built = str(self._find().build())
            if path and Path(built).name != Path(path).name:
                raise PrepareError(
                    f"decontaminate: expected the evaluation sets that the run began with, got others ({built}). They "
                    "have changed: start the run again."
                )
            object.__setattr__(self, "_index_path", path := built)
        return open_index(path)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """Counts `cut` documents; `hits` has an entry for each document and set."""
        index = self.index()
        column = expand_ligatures(batch.column("text"))
        offsets, data = text_buffers(column)
        flags, drop = np.zeros(len(batch), bool), keep_all(len(batch))
        flag_rows(data, offsets, character_table("words"), self.ngram_words, index.bits, index.keys, flags)
        hits: list[tuple[int, Json]] = []
        changed: dict[int, str] = {}
        for row in np.flatnonzero(flags).tolist():
            document = _Document(data[offsets[row] : offsets[row + 1]], index, self.ngram_words)
            units = document.units(self.min_ratio if self.method == "overlap" else 0.0)
            if not len(units):
                continue
            matches = list(document.hits(units))
            text = batch.column("text")[row].as_py().encode()
            pieces = document.pieces(text, units, self.margin) if self.action == "cut" else []
            if 0 < len(pieces) <= self.max_pieces:
                changed[row] = "\n\n".join(pieces)
            else:
                drop[row] = matches[0][0]
            hits += [(row, {**hit, "action": "cut" if row in changed else "dropped"}) for _, hit in matches]
        if changed:
            batch = replace_column(batch, "text", replace_rows(batch.column("text"), changed))
        return StageResult(batch, drop, {"cut": len(changed)}, hits=hits)


class _Document:
    """What a document that shares an n-gram with an index shares."""

    def __init__(self, data: U8, index: EvaluationIndex, ngram: int) -> None:
        self._data, self._index, self._ngram = data, index, ngram
        table, size = character_table("words"), len(data)
        words, hashes = np.empty(size + 2, np.uint64), np.empty(size + 2, np.uint64)
        _, have = read_words(data, 0, size, table, words, 0)
        count = hash_ngrams(words, have, ngram, hashes)
        indices = np.empty(count, np.int64)
        find_ngrams(hashes, count, index.bits, index.keys, indices)
        self._places = np.flatnonzero(indices >= 0)  # The first word of each shared n-gram.
        self._keys = indices[self._places]
        self._starts, self._stops = np.empty(have, np.int64), np.empty(have, np.int64)
        locate_words(data, 0, size, table, self._starts, self._stops)
        keys, first = np.unique(self._keys, return_index=True)
        starts = index.starts[keys]
        counts = index.starts[keys + 1] - starts
        entries = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        order = np.lexsort((index.positions[entries], index.units[entries]))
        entries = entries[order]
        self._units, self._positions = index.units[entries], index.positions[entries].astype(np.int64)
        self._entry_keys = np.repeat(keys, counts)[order]
        self._entry_places = np.repeat(self._places[first], counts)[order]

    def units(self, min_ratio: float) -> I64:
        """The units of which at least that share of the words is in shared n-grams; rows of (unit, first entry,
        entries, covered words)."""
        new = np.ones(len(self._units), bool)
        new[1:] = self._units[1:] != self._units[:-1]
        firsts = np.flatnonzero(new)
        covered = np.full(len(self._units), self._ngram)
        covered[:-1] = np.where(new[1:], self._ngram, np.minimum(np.diff(self._positions), self._ngram))
        sums, units = np.add.reduceat(covered, firsts), self._units[firsts].astype(np.int64)
        rows = np.stack([units, firsts, np.diff(np.append(firsts, len(new))), sums], axis=1)
        chosen: I64 = rows[sums >= min_ratio * self._index.unit_words[units]]
        return chosen

    def hits(self, units: I64) -> Iterator[tuple[int, Json]]:
        """The number of each set that the document has instances of, in order, and what the list says about it."""
        index = self._index
        instances = index.unit_instances[units[:, 0]]
        sets = index.instance_sets[instances]
        ratios = units[:, 3] / index.unit_words[units[:, 0]]
        for number in np.unique(sets).tolist():
            here = np.flatnonzero(sets == number)
            best = here[np.lexsort((here, -units[here, 3], -ratios[here]))[0]]
            _, first, count, _ = units[best].tolist()
            word = int(self._entry_places[first : first + count].min())
            text = bytes(self._data[self._starts[word] : self._stops[word + self._ngram - 1]]).decode()
            id, instance = index.instance(int(instances[best]))
            yield number, {
                "set": index.sets[number].name, "instance": id, "instances": len(np.unique(instances[here])),
                "ratio": round(float(ratios[best]), 4), "ngrams": count, "ngram": text[:_SHOWN_CHARACTERS],
                "text": instance,
            }  # fmt: skip

    def pieces(self, text: bytes, units: I64, margin: int) -> list[str]:
        """The text without the n-grams of these units and `margin` characters around them; short pieces left out."""
        # A ligature of two letters is a byte longer than these.
        longer = np.array([match.start() for match in re.finditer(rb"\xef\xac[\x80-\x82\x85\x86]", text)], np.int64)
        longer -= np.arange(len(longer))
        chosen = np.concatenate([np.arange(first, first + count) for _, first, count, _ in units.tolist()])
        places = self._places[np.isin(self._keys, self._entry_keys[chosen])]
        pieces, position = [], 0
        cuts = np.stack([self._starts[places], self._stops[places + self._ngram - 1]], 1)
        for start, stop in [*(cuts + np.searchsorted(longer, cuts)).tolist(), (len(text), 0)]:
            if start > position:
                piece = text[position:start].decode()
                piece = piece[margin if position else 0 : len(piece) - margin if stop else None]
                pieces += [piece.strip()] if len(piece) >= max(margin, 1) and piece.strip() else []
            position = max(position, stop)
        return pieces
