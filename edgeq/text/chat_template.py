"""Messages to tokens through the chat template of the file.

A template is a program that came with a checkpoint: it runs in jinja2's sandbox, in a child process with limits on memory and
time, and there are limits on what it can build and say.  What a user writes is text: a control token spelled in a message is
encoded as the characters it is made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgeq.errors import InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.network.picture_texts import PictureTexts
from edgeq.system.confinement import ConfinementLimits, LimitError, confined
from edgeq.text.template_tags import TAGS
from edgeq.text.thinking_formats import thinking_format
from edgeq.text.tokenizer import REPLACEMENT, Tokenizer
from edgeq.text.tool_formats import tool_format

Message = Mapping[str, Any]

OTHER_TEMPLATE = "pass another one with --chat-template FILE"
TEMPLATE_LIMITS = ConfinementLimits(memory=256 << 20, seconds=2)
"""The templates of the hub take some milliseconds and less than 10 MiB."""
MAX_SOURCE = 1 << 20
"""Characters of a template, as converters have it; those of the hub have at most some 20,000."""
MAX_TRANSLATED = 16 << 20
"""Characters of the Python program that a template becomes, its constant expressions evaluated."""
MAX_VALUE = 1 << 20
"""Characters, items or bits that one `*`, `**` or `%` of a template may make."""
OUTPUT_FACTOR, OUTPUT_EXTRA = 4, 64 << 10
PROBE = "question"
MARK = "\ue000"
"""Private-use character around the index of a masked control token."""
_MARKED = re.compile(f"{MARK}([0-9]{{1,9}}){MARK}")


class ChatTemplate:
    """UnsupportedError: jinja2 cannot read the template, or takes too much memory or time for it.

    tool_format   how the model calls tools; None: in no way that is known here
    thinking      how it marks what it thinks before an answer; None: in no way that is known here
    """

    def __init__(self, source: str, text: Tokenizer, sees: bool = False, beside: PictureTexts | None = None) -> None:
        """sees   the model reads pictures: bos comes first where its tokenizer puts it before a text, and content is given in
        parts to a template that reads nothing else, as transformers' processors do
        beside    texts that a prompt has beside pictures; None: there are none
        """
        self._text, self._sees, self._beside = text, sees, beside or PictureTexts()
        self._source_length = len(source)
        self._literals = list(text.added)
        self._all = _alternatives(self._literals)
        self._special = _alternatives([literal for literal, special in text.added.items() if special])
        if len(source) > MAX_SOURCE:
            raise UnsupportedError(f"the chat template has more than {MAX_SOURCE} characters; {OTHER_TEMPLATE}")
        self.tool_format, self.thinking = tool_format(source, text.added), thinking_format(text.added)
        environment, code = _environment(), compile(_translated(source), "<template>", "exec")
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    @classmethod
    def of(cls, file: ModelFile, given: str | None, text: Callable[[], Tokenizer]) -> ChatTemplate | None:
        """The template of a file, or `given` instead; None: there is none.  UnsupportedError: it cannot be read."""
        blob = file.blob("chat_template") if given is None else given.encode()
        try:
            vision = file.metadata.config.vision
            return (
                None
                if blob is None
                else cls(blob.decode("utf-8"), text(), vision is not None, vision.texts if vision else None)
            )
        except UnicodeDecodeError:
            raise UnsupportedError(f"{file.path}: the chat template is not UTF-8; {OTHER_TEMPLATE}") from None

    def encode(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Tokens of a conversation, ready for the assistant's turn.

        messages: `{"role": "user", "content": "..."}` and whatever else the template reads; `variables` go to the template too
        (`tools=`, `enable_thinking=` ...).  InputError: not messages, or refused by the template.
        """
        _check(messages)
        masked = [self._masked(m, self._special if m["role"] == "assistant" else self._all) for m in messages]
        if self._sees and self._reads_parts:
            masked = [{**message, "content": parts(message)} for message in masked]
        rendered = self.render(masked, **self._masked(variables, self._all))
        tokens: list[int] = []
        plain: dict[int, list[int]] = {}  # a message may be nothing but literals
        for i, part in enumerate(_MARKED.split(rendered)):
            if i % 2 == 0:
                tokens += self._text.encode_part(self._beside.placed(part)) if part else []
            elif (index := int(part)) < len(self._literals):
                if index not in plain:
                    plain[index] = self._text.encode_plain(self._literals[index])
                tokens += plain[index]
        bos = self._text.bos
        begins = self._sees and bos is not None and self._text.encode("")[:1] == [bos] and bos not in tokens
        return [*self._text.encode("")[:1], *tokens] if begins else tokens

    def encode_with_images(self, messages: Sequence[Message], images: int, image_token: int, **variables: Any) -> list[int]:
        """`encode` of messages with so many images, which are where `with_images` puts them.

        InputError: as both, and a template that has no place for an image.
        """
        seeing = with_images(messages, images)
        try:
            tokens = self.encode(seeing, **variables)
        except InputError:
            # What it refuses without images too, it says itself.
            self.encode([{**message, "content": _text_of(message)} for message in seeing], **variables)
            tokens = []
        if image_token not in tokens:
            raise InputError(f"the chat template has no place for an image; {OTHER_TEMPLATE}")
        return tokens

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template leaves out content that is a string (LLaVA-1.5), and shows it as the text of a part."""

        def shown(content: object) -> str:
            try:
                return self.render([{"role": "user", "content": content}])
            except InputError:
                return ""

        # A template that only prints its content would show a part as Python writes it.
        return (
            PROBE not in shown(PROBE) and "'text'" not in (found := shown([{"type": "text", "text": PROBE}])) and PROBE in found
        )

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The conversation as text; control tokens spelled in messages are not masked.

        InputError: the template refuses the messages.  UnsupportedError: it goes beyond a limit.
        """
        return _confined(lambda: self._rendered(messages, variables))

    def _rendered(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        limit = OUTPUT_FACTOR * (_length(messages) + _length(variables) + self._source_length) + OUTPUT_EXTRA
        pieces, size = [], 0
        try:
            values = {"add_generation_prompt": True, "tools": None, "documents": None, **self._text.special_tokens, **variables}
            for piece in self._template.generate(messages=list(messages), **values):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise SecurityError(f"more than {limit} characters")
        except SecurityError as error:
            raise UnsupportedError(f"the chat template goes too far: {error}; {OTHER_TEMPLATE}") from None
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {error}") from None
        except (MemoryError, RecursionError):
            raise
        # A template is a stranger's program and can raise anything.
        except Exception as error:
            raise InputError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from None
        return "".join(pieces)

    def _masked(self, value: Any, literals: re.Pattern[str] | None) -> Any:
        """`value` with every control-token literal in its strings replaced by its mark."""
        if isinstance(value, str):
            value = value.replace(MARK, REPLACEMENT)
            index = self._literals.index
            return literals.sub(lambda match: f"{MARK}{index(match[0])}{MARK}", value) if literals else value
        if isinstance(value, Mapping):
            return {self._masked(k, literals): self._masked(v, literals) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._masked(v, literals) for v in value]
        return value


def with_images(messages: Sequence[Message], images: int) -> list[Message]:
    """`messages` with a part {"type": "image"} for each image before the text of the last question, unless they have some.

    InputError: there is no question to put them in.
    """
    if any(part.get("type") == "image" for m in messages for part in parts(m)):
        return list(messages)
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    if last < 0:
        raise InputError("images belong to a question; give a message with the role user")
    content = [*([{"type": "image"}] * images), *parts(messages[last])]
    return [{**message, "content": content} if i == last else message for i, message in enumerate(messages)]


def parts(message: Message) -> list[Mapping[str, Any]]:
    """The content of a message as a list of parts, its text as one."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return [part for part in content if isinstance(part, Mapping)]
    return [{"type": "text", "text": content}] if content else []


def _text_of(message: Message) -> str:
    return "".join(str(part.get("text", "")) for part in parts(message))


def _confined(work: Callable[[], str]) -> str:
    try:
        return confined(work, TEMPLATE_LIMITS)
    except LimitError as error:
        raise UnsupportedError(f"the chat template goes too far: {error}; {OTHER_TEMPLATE}") from None


@lru_cache(maxsize=8)
def _translated(source: str) -> str:
    """`_python_source` of a child: jinja2 evaluates constant expressions while it translates.

    It is kept, since a child of a large process takes longer than a translation, and a process may load a model many times.
    """
    environment = _environment()
    return _confined(lambda: _python_source(environment, source))


def _python_source(environment: _Environment, source: str) -> str:
    """The template as Python source, which Python has compiled without an error.

    UnsupportedError: not a template, one that Python refuses (SyntaxError: more than 20 nested loops), or too long.
    """
    try:
        translated = environment.compile(source, raw=True)
        if len(translated) <= MAX_TRANSLATED:
            compile(translated, "<template>", "exec")
            return translated
    except (jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedError(f"the chat template cannot be read: {error}; {OTHER_TEMPLATE}") from None
    raise UnsupportedError(f"the chat template has constants of more than {MAX_TRANSLATED} characters; {OTHER_TEMPLATE}")


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, str) or not messages:
        raise InputError('a chat takes a list of messages: [{"role": "user", "content": "Hello"}]')
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f'message {i} is {str(message)[:80]!r}; expected {{"role": "user", "content": "..."}}')


def _alternatives(literals: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern for any of `literals`, the longest first where one begins another."""
    return re.compile("|".join(re.escape(s) for s in sorted(literals, key=len, reverse=True))) if literals else None


def _length(value: Any) -> int:
    """Characters in all strings of `value`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_length(k) + _length(v) for k, v in value.items())
    return sum(map(_length, value)) if isinstance(value, (list, tuple)) else 8


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox stops attributes and long ranges but not `'a' * 10**9`."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size_of(operator, left, right) > MAX_VALUE:
            raise SecurityError(f"a result of {operator} with more than {MAX_VALUE} characters, items or bits")
        return super().call_binop(context, operator, left, right)


def _size_of(operator: str, left: Any, right: Any) -> int:
    """An upper bound of the size of `left operator right`."""
    if operator == "%" and isinstance(left, str):
        # A width can stand in the format or, as *, among the values.
        if "*" in re.sub(r"%%", "", left):
            return MAX_VALUE + 1
        return len(left) + _length(right) + sum(int(n[:8]) for n in re.findall(r"[0-9]+", left))
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * max(right, 0)
        return left.bit_length() + right.bit_length()
    if operator == "*":
        for items, count in ((left, right), (right, left)):
            if isinstance(count, int) and hasattr(items, "__len__"):
                return len(items) * max(count, 0)
    return 0


def _environment() -> _Environment:
    """What templates of the Hugging Face hub are written for."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=TAGS)
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[[str], str]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own it does not write `<` as an HTML escape."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
