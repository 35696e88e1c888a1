"""Ids are the reference library's on every input, whichever library gives them; and every name finds its tokenizer."""

import ast
import json
import random
import re
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from forebay.dataset.agreement import TOKENIZER_FILE
from forebay.errors import PrepareError, UsageError
from forebay.prepare.tasks.encode import sample_texts
from forebay.prepare.tokenize import encoders as coders
from forebay.prepare.tokenize.encoders import (
    EncoderSpec,
    LibraryEncoder,
    cut_long,
    encode_column,
    fast_encoder,
    make_encoder,
)
from forebay.prepare.tokenize.tokenizers import (
    TokenizerFile,
    byte_tokenizer,
    load_tokenizer,
    parse,
    train_tokenizer,
)
from forebay.storage.store import open_store
from support.preparing import read_lines
from support.shared_data import shared_data
from support.token_parts import coder, text_part

ALPHABET = [
    *"aAbsdt'  \n\r\t129²½!.,-_/",
    *["\u00a0", "\u3000", "\u0301", "é", "ß", "İ", "ſ", "世", "한", "क", "ा", "🎉", "\u200d", "\u0085", "\x00", "\x1c"],
    *["<|endoftext|>", "</s>", "<unk>", "▁", "Ġ", "'LL", "'s", "<0x0A>", "|||IP_ADDRESS|||"],
]
HOSTILE = st.lists(st.sampled_from(ALPHABET) | st.characters(exclude_categories=["Cs"]), max_size=60).map("".join)


@cache
def loaded(name: str) -> tuple[TokenizerFile, LibraryEncoder]:
    result = load_tokenizer(str(shared_data("tokenizers") / name), eos=False)
    return result, LibraryEncoder(result.data)


def encode_all(result: TokenizerFile, folder: Path, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text as `prepare` makes them."""
    store = open_store(folder)
    store.write(TOKENIZER_FILE, result.data)
    ids, lengths = encode_column(EncoderSpec.of(result, store), pa.array(texts, "large_string"))
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


NAMES = ["gpt2", "llama-test-tokenizer.json"]


@pytest.mark.parametrize("name", NAMES)
def test_fast_ids_are_the_references(name):
    pytest.importorskip("gigatoken")
    result, reference = loaded(name)
    fast = fast_encoder(result.data, reference)
    texts = [run * n for run in ("a", " ", "\n", "1", "!", "世", "ab", " \n", "x ") for n in (1, 2, 3, 8, 17, 33, 700)]
    texts += [
        form.format(chr(c)) for c in range(0, 0x30000, 171) if not 0xD800 <= c < 0xE000 for form in ("{}", "a{} b")
    ]
    assert fast.agrees(texts)

    @given(HOSTILE)
    def agree(text):
        assert fast.encode([text])[0].tolist() == reference.encode([text])[0].tolist()

    agree()


def test_known_answers_of_gpt2(tmp_path):
    vectors = shared_data("tokenizers/vectors")
    rows = read_lines(vectors / "gpt2_known_answers.jsonl")
    plans = (vectors / "TestPlans.txt").read_text("utf-8")
    result = re.findall(r"EncodingName: r50k_base\nSample: (.*?)\nEncoded: (\[.*?\])\n", plans, re.S)
    rows += [{"text": text, "ids": ast.literal_eval(ids)} for text, ids in result]
    assert len(rows) > 60
    assert encode_all(loaded("gpt2")[0], tmp_path, [row["text"] for row in rows]) == [row["ids"] for row in rows]


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(coders, "LONG_CHARS", 100)
    monkeypatch.setattr(coders, "_SLACK_CHARS", 50)


LLAMA_3 = r"(?i:'s|'t|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MODELS = {
    "bpe": (models.BPE, trainers.BpeTrainer),
    "unigram": (models.Unigram, partial(trainers.UnigramTrainer, unk_token="[UNK]")),
}
MODELS["wordpiece"] = (partial(models.WordPiece, unk_token="[UNK]"), trainers.WordPieceTrainer)
WORDS = """river meadow sheep's 12345 3.14 naïve e\u0301tude don't (see) — 世界，日本語。 x² http://a.b/c?d=e"""
SPACES = [" ", "  ", "\n", ", ", "\t\n", "."]
CHOOSE = random.Random(1).choice
LONG = "".join(CHOOSE(WORDS.split()) + CHOOSE(SPACES) for _ in range(800))


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    "model, before",
    [
        ("bpe", pre_tokenizers.Metaspace(prepend_scheme="first")),
        ("bpe", pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
        ("bpe", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("bpe", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        ("bpe", pre_tokenizers.Split(Regex(LLAMA_3), "isolated")),
        ("bpe", pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])),
        ("unigram", pre_tokenizers.Metaspace(prepend_scheme="always")),
        ("wordpiece", pre_tokenizers.BertPreTokenizer()),
    ],
)
def test_long_texts_are_cut_where_nothing_changes(model, before):
    make, trainer = MODELS[model]
    tokenizer = HubTokenizer(make())
    tokenizer.pre_tokenizer = before
    tokenizer.train_from_iterator([LONG], trainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False))
    data = tokenizer.to_str().encode()
    reference = LibraryEncoder(data)
    for text in (LONG, LONG.replace(" ", ""), re.sub(r"\s", "", LONG)):
        ((ids,), (expected,)) = (encoder.encode([text]) for encoder in (make_encoder(data, "json"), reference))
        assert ids.tolist() == expected.tolist()
        assert len(list(cut_long(text, reference))) > 10 and max(len(part) for part, _ in cut_long(text)) <= 150


@pytest.mark.usefixtures("short_pieces")
def test_a_text_without_a_safe_place_is_cut_too():
    assert list(cut_long("x" * 500)) == [("x" * 100, 0)] * 5
    assert [len(part) for part, _ in cut_long("é" * 99 + "e\u0301\u0301" + "é" * 200)] == [102, 100, 100]


@pytest.mark.usefixtures("short_pieces")
def test_long_texts_have_the_ids_of_a_real_tokenizer(tmp_path):
    result, reference = loaded("llama-test-tokenizer.json")
    text = "  He said: 'don't', 3.14  and\nnaïve 世界 a b c! -- \n\n x" * 60
    assert encode_all(result, tmp_path, [text]) == [reference.encode([text])[0].tolist()]


def test_ends_are_named_by_policy(tmp_path):
    texts = pa.array(["ab", "", "c"], "large_string")
    assert encode_column(coder(tmp_path), texts)[0].tolist() == [97, 98, 256, 99, 256]
    tokens, lengths = encode_column(coder(tmp_path, bos="<|endoftext|>", eos=False), texts)
    assert tokens.tolist() == [256, 97, 98, 256, 99] and lengths.tolist() == [3, 0, 2]
    assert load_tokenizer("bytes", eos=False).eos_id is None
    with pytest.raises(UsageError, match=r"<\|endoftext\|>"):
        load_tokenizer("bytes", eos="</s>")
    with pytest.raises(UsageError, match="bos"):
        load_tokenizer("bytes", bos=True)


def test_wrong_names_and_damaged_files_are_errors(tmp_path):
    for name in ("nowhere.json", "x.model", "train:9", "a b"):
        with pytest.raises(UsageError):
            load_tokenizer(name)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PrepareError):
        load_tokenizer(str(tmp_path))


def test_training_is_a_function_of_the_sample(tmp_path):
    parts = [text_part(tmp_path, [f"the cat {i} sat on mat {j}" for j in range(50)]) for i in range(8)]
    store = open_store(tmp_path)
    sample = list(sample_texts(store, parts, 1, 2000))
    assert 1900 < sum(map(len, sample)) <= 2000
    assert sample == list(sample_texts(store, parts[::-1], 1, 2000)) != list(sample_texts(store, parts, 2, 2000))
    item, two = (train_tokenizer(iter(sample), 300) for _ in range(2))
    assert item == two and item.vocab_size <= 300 and item.eos_id == 0


def _variant(**changes):
    return json.dumps({**json.loads(byte_tokenizer().to_str()), **changes}).encode()


def test_a_normalizer_that_makes_text_grow_is_refused():
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9}
    assert parse(_variant(normalizer=grow), "x").encode("ba").tokens == ["b", *"a" * 9]
    with pytest.raises(PrepareError, match=r"tokenizer 'x': expected a normalizer .* 81 characters of one"):
        parse(_variant(normalizer={"type": "Sequence", "normalizers": [grow, grow]}), "x")
    with pytest.raises(PrepareError, match="65 characters of one"):
        parse(_variant(normalizer={"type": "Prepend", "prepend": "a" * 65}), "x")


def test_a_regular_expression_that_never_ends_is_named():
    """The library panics, which is no Exception."""
    hostile = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(PrepareError, match=r"tokenizer 'tokenizer\.json': failed on one of 1 texts"):
        LibraryEncoder(_variant(pre_tokenizer=hostile)).encode(["a" * 200_000 + "!"])
