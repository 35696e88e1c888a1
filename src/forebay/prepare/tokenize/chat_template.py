"""Conversations through a chat template, as tokenizer_config.json has it: the text, and which of it is trained on.

A template is a program of strangers: it runs in jinja2's sandbox, without clock, files or attributes of Python, and may
write `MAX_CHARS`. Its loops are not timed: one that never ends blocks its worker, which can be stopped. Trained on is
what it writes for each message of the assistant: what rendering one message more adds to the same conversation with the
prompt for an answer.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.base import Json
from forebay.errors import UsageError
from forebay.formats.records import HEADER_MARK, PROMPT_MARK, RESPONSE_MARK

MAX_MESSAGES = 512
MAX_CHARS = 32 << 20
_MAX_BYTES = 1 << 20
_MESSAGE = re.compile(f"([{PROMPT_MARK}{RESPONSE_MARK}])(?:{HEADER_MARK}([^{HEADER_MARK}]*){HEADER_MARK})?")

Span = tuple[bool, str]


class UnfitConversationError(Exception):
    """The template cannot write a conversation, or not so that its answers are told apart; the reason is its text."""


def load_chat_template(path: str) -> str:
    """The source of a template: a file of Jinja, or the `chat_template` of a tokenizer_config.json."""
    try:
        data = Path(path).read_bytes()
        if len(data) > _MAX_BYTES:
            raise UsageError(f"template: expected a chat template, got {len(data)} bytes ({path}).")
        text = data.decode()
        template = json.loads(text).get("chat_template") if path.endswith(".json") else text
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f"template: expected `plain`, `chatml` or a chat template's file, got {path!r}: {error}."
        ) from error
    if isinstance(template, list):  # several by name, of which one is the default
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if not isinstance(template, str) or not template:
        raise UsageError(f"template: expected a chat_template in {path}, got none.")
    _compiled(template)
    return template


def messages_of(text: str) -> tuple[list[Json], list[Any] | None]:
    """The messages of a text whose turns are marked, and the tools that its first header names."""
    first, *rest = _MESSAGE.split(text)
    messages: list[Json] = [{"role": "user", "content": first}] if first else []
    tools = None
    for mark, header, content in zip(rest[::3], rest[1::3], rest[2::3]):
        try:
            fields = json.loads(header) if header else {}
        except ValueError as error:
            raise UnfitConversationError("damaged_message") from error
        tools = fields.pop("tools", None) or tools
        role = "assistant" if mark == RESPONSE_MARK else "user"
        messages.append({"role": role, "content": content, **fields})
    return messages, tools


def render(template: str, text: str, bos: str, eos: str, hide: Callable[[str], str]) -> list[Span]:
    """The parts of a conversation, each with whether it is trained on; `hide` replaces names in its strings.

    Raises UnfitConversationError.
    """
    messages, tools = strings_replaced(messages_of(text), hide)
    if len(messages) > MAX_MESSAGES:  # each is rendered once for each answer
        raise UnfitConversationError("too_many_messages")
    values = {"tools": tools, "bos_token": bos, "eos_token": eos}
    full = _render(template, messages, False, values)
    spans: list[Span] = []
    offset = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        last = index + 1 == len(messages)
        stop = len(full) if last else _prefix(full, _render(template, messages[: index + 1], False, values))
        start = -1
        for prompted in (True, False):
            if start < 0:
                start = _prefix(full, _render(template, messages[:index], prompted, values)) if index else 0
        if not offset <= start <= stop:
            raise UnfitConversationError("unmasked_template")
        spans += [(False, full[offset:start]), (True, full[start:stop])]
        offset = stop
    return [span for span in (*spans, (False, full[offset:])) if span[1]]


def _prefix(full: str, part: str) -> int:
    return len(part) if full.startswith(part) else -1


def _render(template: str, messages: list[Json], prompted: bool, values: Json) -> str:
    parts, size = [], 0
    try:
        for part in _compiled(template).generate(messages=messages, add_generation_prompt=prompted, **values):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARS:
                raise UnfitConversationError("too_long")
    except UnfitConversationError:
        raise
    except Exception as error:  # a template may do anything with a message that it does not expect
        raise UnfitConversationError("refused_by_template") from error
    return "".join(parts)


class _Generation(Extension):
    """`{% generation %}`, which marks what is trained on: its body alone, as the spans are found without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which limits the length of `range`, with limits of what `*` and `**` make."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for text, count in ((left, right), (right, left)):
            if isinstance(text, (str, list, tuple)) and isinstance(count, int) and len(text) * count > MAX_CHARS:
                raise TemplateError(f"{len(text)} characters {count} times")
        if operator == "**":
            raise TemplateError("a power")
        return super().call_binop(context, operator, left, right)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _no_clock(format: str = "") -> str:
    raise TemplateError("the date, on which the bytes of a dataset would depend")


@lru_cache(4)
def _compiled(template: str) -> Any:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_no_clock)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise UsageError(f"template: expected a chat template of Jinja, got {error}.") from error


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def strings_replaced(value: Any, replace: Any) -> Any:
    """The value with all strings in it replaced."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, dict):
        return {key: strings_replaced(item, replace) for key, item in value.items()}
    return [strings_replaced(item, replace) for item in value] if isinstance(value, (list, tuple)) else value


def guarded(names: list[str]) -> tuple[Any, Any]:
    """Two functions: one that hides the names in a text from the template's reader, and one that shows them again."""
    if not names:
        return str, str
    hidden = {name: f"\ufdd3{index}\ufdd3" for index, name in enumerate(names)}
    shown = {mark: name for name, mark in hidden.items()}
    pattern = re.compile(_any_of(names))
    return (
        lambda text: pattern.sub(lambda match: hidden[match[0]], text),
        lambda text: re.sub("\ufdd3[0-9]+\ufdd3", lambda match: shown.get(match[0], ""), text),
    )


def pieces(text: str, names: list[str]) -> Iterator[tuple[bool, str]]:
    """The special tokens' names in a template's text, and what stands between them."""
    for part in re.split(f"({_any_of(names)})", text) if names else [text]:
        if part:
            yield part in names, part


def _any_of(names: list[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
