"""Chat templates: the text is what the template writes, answers alone are trained on, and templates are sandboxed."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from forebay.dataset.reader import open_dataset
from forebay.errors import UsageError
from forebay.formats.inputs import ReadOptions
from forebay.formats.records import to_record
from forebay.prepare.tokenize.chat_template import UnfitConversationError, load_chat_template, messages_of, render
from support.preparing import prepare, write_jsonl
from support.trained_tokenizer import trained_bpe

CHATML = """{%- if tools %}
{{- '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{% generation %}{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) }}{%- endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is the weather in <|im_end|> Köln?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "name": "weather"},
    {"role": "assistant", "content": "It is sunny."},
]
ANSWERS = ['<tool_call>{"name": "weather", "arguments": {"place": "Köln"}}<|im_end|>\n', "It is sunny.<|im_end|>\n"]


def spans(messages: list[dict], template: str = CHATML, **row: Any) -> list[tuple[bool, str]]:
    record = to_record(0, {"messages": messages, **row}, ReadOptions(messages_key="messages").with_roles())
    assert not record.problem, record.problem
    return render(template, record.text, "<s>", "</s>", str)


def test_answers_alone_are_trained_on():
    result = spans(MESSAGES, tools=TOOLS)
    assert [text for trained, text in result if trained] == ANSWERS
    assert "".join(text for _, text in result) == (
        '<|im_start|>tools\n[{"type": "function", "function": {"name": "weather"}}]<|im_end|>\n'
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHow is the weather in <|im_end|> Köln?<|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWERS[0]}<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n{ANSWERS[1]}"
    )


def test_messages_come_back_as_they_were():
    options = ReadOptions(messages_key="messages").with_roles()
    sharegpt = [{"from": "human", "value": "Hi\ufdd2{}\ufdd1"}, {"from": "gpt", "value": "Hello"}]
    messages, _ = messages_of(to_record(0, {"messages": sharegpt}, options).text)
    assert messages == [{"role": "user", "content": "Hi{}"}, {"role": "assistant", "content": "Hello"}]


def test_templates_that_cannot_be_masked_or_refuse():
    for template, reason in (
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "unmasked_template"),
        ("{{ raise_exception('no system message') }}", "refused_by_template"),
        ("{{ strftime_now('%Y') }}", "refused_by_template"),
        ("{{ ''.__class__.__mro__ }}", "refused_by_template"),
        ("{{ messages.append(1) }}", "refused_by_template"),
        ("{% for i in range(99999999) %}x{% endfor %}", "refused_by_template"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "too_long"),
        ("{% include '/etc/passwd' %}", "refused_by_template"),
        ("{{ 'x' * 9999999999 }}", "refused_by_template"),
        ("{{ 9 ** 9999999 }}", "refused_by_template"),
    ):
        with pytest.raises(UnfitConversationError, match=reason):
            spans(MESSAGES, template)
    with pytest.raises(UnfitConversationError, match="damaged_message"):
        messages_of("\ufdd0\ufdd2{broken\ufdd2text")
    with pytest.raises(UnfitConversationError, match="too_many_messages"):
        spans([{"role": "user", "content": "x"}] * 513)


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("none.jinja", None, "expected `plain`, `chatml` or a chat template's file"),
        ("a.jinja", "{% for %}", "expected a chat template of Jinja, got"),
        ("a.json", "{}", "expected a chat_template in"),
        ("a.json", "[]", "expected `plain`, `chatml` or a chat template's file"),
        ("a.jinja", "x" * (1 << 21), "got 2097152 bytes"),
    ],
)
def test_wrong_files(name, data, message, tmp_path):
    if data is not None:
        (tmp_path / name).write_text(data)
    with pytest.raises(UsageError, match=message):
        load_chat_template(str(tmp_path / name))


def test_rows_by_a_chat_template(tmp_path):
    model = Tokenizer.from_file(str(trained_bpe(tmp_path / "tokenizer.json", SPECIAL, "some text", 300)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    rows = [{"messages": MESSAGES, "tools": TOOLS}, {"messages": MESSAGES[:2]}, {"messages": [{"role": 5}]}]
    write_jsonl(tmp_path / "in.jsonl", rows)
    table = {
        "read": {"messages_key": "messages"},
        "rows": {"max_tokens": 512, "template": str(tmp_path / "tokenizer_config.json")},
        "tokenize": {"tokenizer": str(tmp_path / "tokenizer.json")},
        "max_error_rate": 0.5,
    }
    result = prepare(tmp_path / "in.jsonl", tmp_path / "out", settings=table, tokenizer=None)
    assert result.dropped == {"malformed": 1, "nothing_learnt": 1}
    tensors = open_dataset(tmp_path / "out").open_slice(0).tensors
    ids, labels = (np.asarray(tensors[name])[0] for name in ("input_ids", "labels"))
    trained = model.decode(labels[labels >= 0].tolist(), skip_special_tokens=False)
    assert trained == "".join(ANSWERS)
    end, start = model.token_to_id("<|im_end|>"), model.token_to_id("<|im_start|>")
    assert (ids == start).sum() == 6 and (ids == end).sum() == 6  # the name in a message is ordinary text
    text = model.decode(ids[np.asarray(tensors["attention_mask"])[0] > 0].tolist(), skip_special_tokens=False)
    assert "weather in <|im_end|> Köln?" in text
