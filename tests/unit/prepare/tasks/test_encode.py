"""ENCODE: each kept document once and whole, on its side for ever, the same for any batch and any interruption."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.prepare.dedup.cutting import Flags
from forebay.prepare.tasks import encode as encoding
from forebay.prepare.tasks.encode import EncodeTask, encode
from forebay.prepare.tasks.shuffle import EncodedPart, Shuffle
from forebay.prepare.tokenize import encoders as coders
from forebay.storage.store import FolderStore, open_store
from support.token_parts import coder, text_part

TEXTS = [f"Document {i}: " + "grüße, 世界! \x00\r\n<|endoftext|> " * (i % 9) for i in range(300)]


def read_objects(folder: Path, part: EncodedPart) -> dict[str, bytes]:
    return {kind: (folder / part.object(kind)).read_bytes() for kind in part.kinds}


@given(st.lists(st.text(max_size=30), max_size=60), st.integers(1, 40), st.booleans(), st.integers(0, 3))
def test_bytes_do_not_depend_on_batches(tmp_path_factory, texts, rows, shuffled, scale):
    """Nor on the stretches in which long documents are encoded."""
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    actual, stretches = [], [(encoding, "LONG_CHARS", 10), (coders, "LONG_CHARS", 10), (coders, "_SLACK_CHARS", 2)]
    for batch_rows, here in ((1000, 0), (rows, scale)):
        folder = tmp_path_factory.mktemp("e")
        task = EncodeTask(
            text_part(folder, texts, batch_rows), coder(folder), open_store(folder), with_ids=True,
            shuffle=Shuffle(7) if shuffled else None,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            for module, name, value in stretches[:here]:
                patch.setattr(module, name, value)
            result = encode(task, here)
        assert result.documents_out + result.dropped.get("empty", 0) == len(texts)
        actual.append(read_objects(folder, result.part))
    assert actual[0] == actual[1]


def test_names_depend_on_all_that_the_result_does(tmp_path):
    part = text_part(tmp_path, TEXTS)
    task = EncodeTask(part, coder(tmp_path), open_store(tmp_path))
    others = [
        replace(task, spec=coder(tmp_path, eos=False)),
        replace(task, dedup_name="d"),
        replace(task, shuffle=Shuffle(1)), replace(task, shuffle=Shuffle(1, 1)), replace(task, with_ids=True),
        replace(task, part=replace(part, name="other")),
    ]  # fmt: skip
    assert len({item.name for item in [task, *others]}) == 7
    elsewhere = FolderStore("elsewhere")
    assert replace(task, store=elsewhere, drop=Flags(elsewhere, "somewhere", 0, 1)).name == task.name


def test_a_part_that_lost_rows_is_noticed(tmp_path):
    part = text_part(tmp_path, TEXTS)
    with pytest.raises(PrepareError, match="expected 301"):
        encode(EncodeTask(replace(part, documents=301), coder(tmp_path), open_store(tmp_path)))
    (tmp_path / part.arrow).write_bytes((tmp_path / part.arrow).read_bytes()[:500])
    with pytest.raises(PrepareError, match="cannot read"):
        encode(EncodeTask(part, coder(tmp_path), open_store(tmp_path)))
    assert not list(tmp_path.glob(".*tmp*"))
