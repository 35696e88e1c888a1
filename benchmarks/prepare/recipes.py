"""How many documents each rule of each recipe drops, on the sample data: docs/explanation/recipe-figures.md.

    python -m benchmarks.prepare.recipes [RECIPE…]

Web recipes read the 1,497 pages of WCXB (of seven kinds, each with text: less junk than in a crawl) and 20 texts
of CommonCrawl; fineweb-2 the 732 multilingual pages of the snippets; code the Python files of this package; wikipedia a
piece of a dump. Classifiers, which do not come with the package, are left out.
"""

from __future__ import annotations

import bz2
import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.prepare.corpus import data_folder
from benchmarks.prepare.extract import gold_pages
from forebay import prepare_dataset
from forebay.prepare.config import load_recipe, recipe_names

LEFT_OUT = {
    "dclm": {"score": {"quality": False}},
    "fineweb-edu": {"score": {"edu": False}},
}
SOURCES = {"code": "code", "wikipedia": "wikipedia", "fineweb-2": "snippets"}


def make_inputs(folder: Path) -> None:
    """The pages as HTML files, and the others."""
    for name in ("wcxb", "snippets", "code", "wikipedia"):
        (folder / name).mkdir()
    for name in ("wcxb", "snippets"):
        for page in gold_pages(name):
            (folder / name / f"{Path(page.key).stem}.html").write_text(page.html, "utf-8", "replace")
    for path in data_folder().glob("jsonl/cc_en_head-*.jsonl"):
        shutil.copy(path, folder / "wcxb")
    root = Path(__file__).resolve().parents[2] / "src"
    for path in root.rglob("*.py"):
        shutil.copy(path, folder / "code" / "-".join(path.relative_to(root).parts))
    (dump,) = data_folder().glob("wikipedia/enwiki-latest*.bz2")
    (folder / "wikipedia/dump.xml").write_bytes(bz2.decompress(dump.read_bytes()))


def main() -> None:
    """Print a table for each recipe."""
    names = sys.argv[1:] or [
        name for name in recipe_names() if name not in ("sft", "nemotron-cc", "redpajama-v2-signals", "dolma-3")
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        for name in names:
            source = Path(folder) / SOURCES.get(name, "wcxb")
            result = prepare_dataset(
                [source], f"{folder}/{name}.out", recipe=name, to="parquet", settings=LEFT_OUT.get(name), workers=2
            )
            print(f"\n## {name}: {result.documents_in} documents, {result.documents_out} kept")
            order = [reason for stage in load_recipe(name).stages for reason in stage.reasons]
            rows = sorted(
                result.dropped.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)
            )
            remaining = result.documents_in
            for reason, count in rows:
                print(f"| `{reason}` | {count} | {100 * count / result.documents_in:.1f} |")
                remaining -= count
            assert remaining == result.documents_out, json.dumps(result.dropped)


if __name__ == "__main__":
    main()
