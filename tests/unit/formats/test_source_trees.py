"""Source trees: languages by name and first line, licences by file and text, what is left out."""

from pathlib import Path

from forebay.formats.code import licence_of, spdx_of
from forebay.formats.inputs import ReadOptions
from forebay.formats.records import Record
from forebay.prepare.inputs import find_inputs
from forebay.prepare.tasks.keys import source_key
from support.paths import ROOT
from support.preparing import read_records

MIT = """The MIT License (MIT)

Copyright (c) 2026 Somebody and others

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
APACHE = ROOT / "LICENSE"
SPDX = "SPDX-License-Identifier: "


def records(path: Path) -> dict[str, Record]:
    columns = {"language": "text", "licence": "text", "other": "text"}
    return {record.id: record for record in read_records(path, format="code", columns=columns)}


def test_every_text_of_a_tree_is_a_document_with_language_and_licence(tmp_path):
    files = {
        "one/LICENSE": (MIT, "", "MIT"),
        "one/src/a.py": ("x = 1\n", "python", "MIT"),
        "one/src/page.html": ("<html>as it lies</html>", "html", "MIT"),
        "one/data.json": ('{"a": 1}', "json", "MIT"),
        "one/run": ("#!/usr/bin/env perl\nprint 1;\n", "perl", "MIT"),
        "one/vendor/b.cc": (f"// {SPDX}Apache-2.0 OR MIT\nint main() {{}}\n", "c++", "Apache-2.0 OR MIT"),
        "one/vendor/COPYING": (APACHE.read_text(), "", "Apache-2.0"),
        "one/vendor/deep/er/c.h": ("int a;\n", "c", "Apache-2.0"),
        "two/LICENSE-MIT": (MIT, "", "Apache-2.0 AND MIT"),
        "two/LICENSE-APACHE": (APACHE.read_text(), "", "Apache-2.0 AND MIT"),
        "two/license.py": ("# No licence.\n", "python", "Apache-2.0 AND MIT"),
        "three/LICENCE.md": ("All rights reserved. Do not copy.", "markdown", "NOASSERTION"),
        "three/Makefile": ("all:\n", "makefile", "NOASSERTION"),
        "four/latin.c": ("// Größe\n", "c", ""),
    }
    for name, (text, _, _) in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1" if name == "four/latin.c" else "utf-8"))
    (tmp_path / "one" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (tmp_path / "one" / "damaged.txt").write_bytes(b"words \xff\xfe\x9d words")
    got = records(tmp_path)
    damaged = next(record for record in got.values() if record.problem)
    assert damaged.problem.startswith("not UTF-8")
    read = {name.partition("/")[2]: record for name, record in got.items() if not record.problem}
    assert {name: (record.text, *record.values) for name, record in read.items()} == {
        name: (*expected, "") for name, expected in files.items()
    }


def test_a_licence_above_what_the_user_named_is_not_looked_at(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "LICENSE").write_text(MIT)
    (tmp_path / "tree" / "a.py").write_text("x = 1\n")
    assert records(tmp_path / "tree")["tree/a.py"].values == ("python", "", "")
    (tmp_path / "tree" / "LICENSE").symlink_to(tmp_path / "absent")
    (tmp_path / "tree" / "licence").mkdir()
    assert records(tmp_path / "tree")["tree/a.py"].values[1] == ""
    (tmp_path / "tree" / "COPYING").write_text(MIT + APACHE.read_text())
    (tmp_path / "tree" / "LICENSE.txt").write_text(MIT)
    assert records(tmp_path / "tree")["tree/a.py"].values[1] == "Apache-2.0 AND MIT"


def test_licence_texts_are_told_apart():
    from identify.vendor.licenses import LICENSES

    assert {name: licence_of(text) for name, text in LICENSES} == {name: name for name, _ in LICENSES}
    assert licence_of("") == licence_of(MIT[:400]) == ""
    assert licence_of(MIT + APACHE.read_text()) == "Apache-2.0 AND MIT"


def test_identifiers_in_a_file():
    texts = {
        "/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */": "GPL-2.0 WITH Linux-syscall-note",
        "<!-- SPDX-License-Identifier: MIT -->": "MIT",
        "# SPDX-License-Identifier:   (MIT OR  Apache-2.0)\r\n": "(MIT OR Apache-2.0)",
        "x" * 5000 + "SPDX-License-Identifier: MIT": "",
        "SPDX-License-Identifier:\nMIT": "",
    }
    assert {text: spdx_of(text) for text in texts} == texts


def test_a_licence_is_part_of_the_name_of_what_is_under_it(tmp_path):
    """A run that goes on after LICENSE changed reads again what has its licence, and nothing else."""
    for name, text in {"tree/LICENSE": MIT, "tree/a/x.py": "x = 1\n", "tree/b/COPYING": MIT, "tree/b/y.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def keys():
        options = ReadOptions(format="code", columns={"licence": "text"})
        return {file.name: source_key(file) for file in find_inputs(tmp_path / "tree", options).files}

    before = keys()
    assert keys() == before
    (tmp_path / "tree/LICENSE").write_text(APACHE.read_text())
    changed = keys()
    assert changed["tree/a/x.py"] != before["tree/a/x.py"] and changed["tree/b/y.py"] == before["tree/b/y.py"]
    (tmp_path / "tree/a/LICENSE").write_text(MIT)
    assert keys()["tree/a/x.py"] not in (changed["tree/a/x.py"], before["tree/a/x.py"])
