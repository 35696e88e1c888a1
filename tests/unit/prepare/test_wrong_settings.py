"""Settings of stages and of deduplication that cannot be: each is named."""

import math

import pytest

from forebay.errors import UsageError
from forebay.prepare.clean.boilerplate import Boilerplate
from forebay.prepare.clean.pii import Pii
from forebay.prepare.clean.toxic import Toxic
from forebay.prepare.decontaminate import Decontaminate
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.filters.language import Language
from forebay.prepare.filters.perplexity import Perplexity
from forebay.prepare.filters.quality import GopherRepetition, Length
from forebay.prepare.scores.columns import Bucket, Combine, Repeat, Select, Subset

WRONG = {
    Boilerplate: [
        ({"patterns": "/nowhere"}, "patterns: expected a file"),
    ],
    Pii: [
        ({"kinds": ("mail",)}, "kinds: expected 'email', .*'key', .*, got 'mail'"),
    ],
    Toxic: [
        ({"lists": "/nowhere"}, "lists: .*does not exist"),
        ({"lists": "/", "allow": "x"}, "allow: expected a list"),
    ],
    Length: [
        ({"min_words": 5, "max_words": 4}, "min_words: expected "),
    ],
    GopherRepetition: [
        ({"top_ngrams": [[0, 0.1]]}, "top_ngrams: expected "),
        ({"top_ngrams": [[2, 0.1], [2, 0.2]]}, "top_ngrams: expected "),
        ({"max_duplicate_lines": math.nan}, "max_duplicate_lines: expected "),
    ],
    Language: [({"keep": [1]}, "keep: expected ")],
    Perplexity: [
        ({"model": "x", "keep_percentile": [60, 0]}, "keep_percentile: expected "),
    ],
    Decontaminate: [
        ({}, "sets: expected files, folders or hub names of evaluation sets, got none"),
        ({"sets": ("/none.jsonl",)}, r"sets: expected files, folders or hub names, got '/none\.jsonl'"),
    ],
    Dedup: [
        ({"bands": 0}, "bands: expected at least 1, got 0"),
        ({"bands": 1000, "rows": 100}, "bands: expected at most 4096 hashes"),
        ({"keep": "last"}, "keep: expected 'first', 'longest' or 'best', got 'last'"),
        ({"keep": "best"}, "score: expected a column with keep = 'best'"),
        ({"exact": True, "max_cut_share": 0.5}, "max_cut_share: expected lines, sentences, substring or overlap"),
    ],
    Select: [
        ({"column": "x"}, ".*expected bounds"),
        ({"column": "x", "min": 1, "one_of": ("a",)}, ".*one kind of them, got 2"),
        ({"column": "x", "min": 2, "max": 1}, "min: expected at most max"),
        ({"column": "x", "after": "yesterday"}, "after: expected a date"),
        ({"column": "x", "keep_percentile": (90, 10)}, "keep_percentile: expected"),
    ],
    Bucket: [
        ({"column": "x"}, "thresholds: expected one of"),
        ({"column": "x", "thresholds": (2, 1)}, "thresholds: expected rising"),
    ],
    Combine: [
        ({}, "columns_of: expected at least one"),
    ],
    Subset: [({"column": "a", "min": 1, "subset": "../x"}, "subset: ")],
    Repeat: [({}, "column: expected the name")],
}


@pytest.mark.parametrize("kind, settings, message", [(kind, *case) for kind, cases in WRONG.items() for case in cases])
def test_a_setting_that_cannot_be_is_named(kind, settings, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        kind(**settings)
