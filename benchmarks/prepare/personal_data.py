"""Personal data: precision and recall on the labelled sentences of presidio-research, beside presidio and datatrove.

    python -m benchmarks.prepare.personal_data

Presidio is its pattern recognizers alone (no model of names, no words around), with scores above 0.3, below which are
patterns that match any number; datatrove its PIIFormatter, which knows e-mail and IP addresses. A span counts as found
if something of the kind overlaps it. The sentences are synthetic, and the words that `[pii]` expects around telephone
numbers were chosen with them in view.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from benchmarks.measure import Figure
from benchmarks.prepare.batches import to_batches
from benchmarks.prepare.corpus import data_folder
from benchmarks.prepare.peers import ask
from forebay.formats.records import Record
from forebay.prepare.clean.pii import KINDS, Pii
from forebay.prepare.documents import text_buffers

Spans = list[tuple[int, int]]
ENTITIES = {
    "EMAIL_ADDRESS": ("email",), "IP_ADDRESS": ("ipv4", "ipv6"), "CREDIT_CARD": ("card",), "IBAN_CODE": ("iban",),
    "PHONE_NUMBER": ("phone",), "US_SSN": ("us_ssn",), "US_DRIVER_LICENSE": ("driving_licence",),
}  # fmt: skip
PEER = """
from presidio_analyzer import predefined_recognizers as known
from datatrove.pipeline.formatters.pii import PIIFormatter
names = {"EMAIL_ADDRESS": "EmailRecognizer", "IP_ADDRESS": "IpRecognizer", "CREDIT_CARD": "CreditCardRecognizer",
         "IBAN_CODE": "IbanRecognizer", "PHONE_NUMBER": "PhoneRecognizer", "US_SSN": "UsSsnRecognizer",
         "US_DRIVER_LICENSE": "UsLicenseRecognizer"}
recognizers = {entity: getattr(known, name)() for entity, name in names.items()}
formatter = PIIFormatter()
def presidio(text):
    pairs = ((e, m) for e, r in recognizers.items() for m in r.analyze(text, [e], None) or [])
    return [(e, m.start, m.end) for e, m in pairs if m.score > 0.3]
def datatrove(text):
    replacers = (("EMAIL_ADDRESS", formatter.emails_replacer), ("IP_ADDRESS", formatter.ip_replacer))
    pairs = ((e, m) for e, r in replacers for m in r.regex.finditer(text) if not r.validator or r.validator(m.group(0)))
    return [(e, m.start(), m.end()) for e, m in pairs]
answer = {}
for name, find in (("presidio, patterns", presidio), ("datatrove", datatrove)):
    find(request[0])
    start = time.process_time()
    answer[name] = [[find(text) for text in request], time.process_time() - start]
"""


def ours(texts: Sequence[str], public_only: bool) -> tuple[list[list[tuple[str, int, int]]], float]:
    """Entity, start and stop in characters, by text; CPU seconds."""
    stage = Pii(public_only=public_only)
    (batch,) = to_batches([Record(i, text=text) for i, text in enumerate(texts)])
    stage.apply(batch)
    started = time.process_time()
    stage.apply(batch)
    spent = time.process_time() - started
    offsets, data = text_buffers(batch.column("text"))
    entity_of = {kind: entity for entity, kinds in ENTITIES.items() for kind in kinds}
    spans_by_text: list[list[tuple[str, int, int]]] = [[] for _ in texts]
    spans = stage.find(batch.column("text"))
    rows = offsets.searchsorted(spans[0], side="right") - 1
    for row, first, stop, kind in zip(rows, *spans):
        if entity := entity_of.get(KINDS[kind]):
            before = len(data[offsets[row] : first].tobytes().decode())
            spans_by_text[row].append((entity, before, before + len(data[first:stop].tobytes().decode())))
    return spans_by_text, spent


def score(gold: Sequence[Spans], spans_by_text: Sequence[Spans]) -> str:
    """Precision and recall."""
    hits = sum(any(a < y and x < b for x, y in some) for spans, some in zip(gold, spans_by_text) for a, b in spans)
    right = sum(any(a < y and x < b for a, b in spans) for spans, some in zip(gold, spans_by_text) for x, y in some)
    total, labelled = sum(map(len, spans_by_text)), sum(map(len, gold))
    return f"{right / total if total else 0:.3f} {hits / labelled:.3f}" if total else "-"


def measure() -> list[Figure]:
    """Print the table."""
    paths = [data_folder() / f"pii/{name}.json" for name in ("synth_dataset_v2", "generated_small")]
    rows = [row for path in paths for row in json.loads(path.read_text("utf-8"))]
    texts = [row["full_text"] for row in rows]
    size = sum(len(text.encode()) for text in texts) / 1e6
    engines = {"forebay": ours(texts, True), "forebay, private IP too": ours(texts, False), **(ask(PEER, texts) or {})}
    print(
        f"{len(texts)} sentences: precision and recall\n{'':20}{'labelled':>9}" + "".join(f"{n:>26}" for n in engines)
    )
    for entity in ENTITIES:
        gold = [
            [(s["start_position"], s["end_position"]) for s in row["spans"] if s["entity_type"] == entity]
            for row in rows
        ]
        cells = [
            score(gold, [[(a, b) for e, a, b in some if e == entity] for some in spans_by_text])
            for spans_by_text, _ in engines.values()
        ]
        print(f"{entity:20}{sum(map(len, gold)):9}" + "".join(f"{cell:>26}" for cell in cells))
    print(f"{'MB per CPU second':29}" + "".join(f"{size / spent:26.2f}" for _, spent in engines.values()))
    return []


if __name__ == "__main__":
    measure()
