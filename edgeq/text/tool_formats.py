"""How models write calls of tools, as data: which format a model has is found in its chat template and its tokens.

Each format is what the model's authors trained it to write, and what its chat template writes for calls of earlier turns.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

JSON_HEAD, JSON_TAIL = '{"name": "', "}"


@dataclass(frozen=True)
class ToolFormat:
    """An answer that calls tools is text, then blocks: begin, opens, one call or several, closes, end.  A call is head, the
    name of the tool, middle, its arguments as a JSON object, tail.

    template    texts that stand in the chat template of models with this format;  without: of others;  tokens: control tokens
                that such models have
    begin       "": an answer is one block or text, and text does not begin with {
    separator   between the calls of a block; None: a block has one call
    between     between blocks; None: an answer has one block
    prefix      a control token that may come before a block
    tools_in    what the template reads the tools from: its variable `tools`, or the system message
    id_length   characters of the identifier of a call, which the template may check
    """

    name: str
    template: tuple[str, ...]
    begin: str
    end: str = ""
    opens: str = ""
    closes: str = ""
    separator: str | None = None
    between: str | None = None
    head: str = JSON_HEAD
    middle: str = '", "arguments": '
    tail: str = JSON_TAIL
    prefix: str = ""
    without: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    tools_in: Literal["variable", "system"] = "variable"
    id_length: int = 29

    @property
    def literals(self) -> tuple[str, ...]:
        """What may be a control token of its own, which a decoder leaves out of the text."""
        return tuple(text for text in (self.begin, self.middle, self.end) if text)


FORMATS = (
    # Hermes 2 Pro and 3, Qwen2.5, Qwen3, SmolLM3.  Qwen3-Coder and GLM write XML in the same tags.
    ToolFormat(
        "hermes",
        template=("<tool_call>", "</tool_call>", "tools"),
        without=("<function=", "<arg_key>"),
        begin="<tool_call>",
        opens="\n",
        closes="\n",
        end="</tool_call>",
        between="\n",
    ),
    # Llama 3.1, 3.2 and 3.3: one call, which is the whole answer.
    ToolFormat(
        "llama3",
        template=('"parameters": dictionary of argument name and its value', "tools"),
        begin="",
        middle='", "parameters": ',
        prefix="<|python_tag|>",
    ),
    # Mistral 7B v0.3, Nemo, Mixtral 8x22B v0.3: tokenizers before v11.
    ToolFormat(
        "mistral",
        template=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        without=("[ARGS]",),
        begin="[TOOL_CALLS]",
        opens=" [",
        separator=", ",
        closes="]",
        id_length=9,
    ),
    # Mistral Small 3.2, Devstral: tokenizers from v11 on.
    ToolFormat(
        "mistral-args",
        template=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[ARGS]"),
        begin="[TOOL_CALLS]",
        head="",
        middle="[ARGS]",
        tail="",
        between="",
        id_length=9,
    ),
    # Phi-4-mini: its template writes the tools that the system message has, as JSON.
    ToolFormat(
        "phi",
        template=("<|tool|>", "message['tools']"),
        tokens=("<|tool_call|>", "<|/tool_call|>"),
        begin="<|tool_call|>",
        opens="[",
        separator=", ",
        closes="]",
        end="<|/tool_call|>",
        tools_in="system",
    ),
)


def tool_format(template: str, tokens: Collection[str]) -> ToolFormat | None:
    """The format of a model with this chat template and these control tokens; None: it calls no tools in a format here."""
    # Within a string of jinja2 a quote may be escaped.
    text = template.replace('\\"', '"')
    for found in FORMATS:
        named = all(mark in text for mark in found.template) and not any(mark in text for mark in found.without)
        if named and all(token in tokens for token in found.tokens):
            return found
    return None
