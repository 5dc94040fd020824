"""Tools that a model may call: what a caller gives, what the template shows, and the grammar that calls are held to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeq.errors import InputError, UnsupportedError
from edgeq.runtime.answers.call_reader import NAME
from edgeq.runtime.answers.constraint import MAX_SCHEMA_DEPTH, Compile, Constraint, schema_text, shape
from edgeq.runtime.answers.response_format import ResponseFormat, grammar_of, schema_of
from edgeq.runtime.arguments import flag
from edgeq.text.tokenizer import Tokenizer
from edgeq.text.tool_formats import ToolFormat

MAX_TOOLS = 128
CHOICES = ("auto", "none", "required")
PLAIN = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
"""Keywords of a schema that says nothing of members it does not name."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    parameters   JSON Schema of its arguments, an object
    strict       a schema with keywords that are not supported is refused; else they are ignored
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema that those of a call are held to.

        JSON Schema lets an object have any members beside those that are named, but no function has such arguments, and clients
        leave it out to say so: unless the schema has more than names, there are none.
        """
        found = {"type": "object", **self.parameters}
        named, needed = found.get("properties"), found.get("required") or []
        # What is no schema stays as it is: llguidance says what is wrong with it.
        if not isinstance(named, Mapping) or not isinstance(needed, (list, tuple)) or not set(found) <= PLAIN:
            return found
        known = all(isinstance(each, str) and each in named for each in needed)
        return {**found, "additionalProperties": False} if known else found

    def shown(self) -> dict[str, Any]:
        """As chat templates of the Hugging Face hub expect it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


@dataclass(frozen=True)
class ToolUse:
    """Which tools an answer may call.

    shown      those that the prompt has;  callable: those that may be called
    required   the answer is a call;  parallel: it may have several
    """

    form: ToolFormat
    shown: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True

    def compiled(self, compile: Compile, text: Tokenizer, response_format: ResponseFormat | None) -> Constraint:
        """What an answer is held to; `response_format`: and its text, where it calls nothing.

        InputError: a schema that cannot be used.  UnsupportedError: llguidance is not installed.
        """
        if response_format is not None and not self.form.begin and not self.required:
            raise InputError("this model writes calls as JSON: leave out `response_format`, or `tools`")
        answer = None if self.required else schema_of(response_format)
        try:
            return compile(self._grammar(text, answer, lenient=False))
        except InputError:
            if all(tool.strict for tool in self.callable):
                raise
        return compile(self._grammar(text, answer, lenient=True))

    def _grammar(self, text: Tokenizer, answer: str | None, lenient: bool) -> str:
        """In llguidance's Lark syntax; `answer`: the schema of what is no call, None for any text."""
        form = self.form
        begin, opens, closes, end = (_literal(part, text) for part in (form.begin, form.opens, form.closes, form.end))
        rest = f"{opens} calls {closes} {end}"
        blocks = f"({_literal(form.between or '', text)} block)*" if form.between is not None and self.parallel else ""
        several = f"({_literal(form.separator, text)} call)*" if form.separator is not None and self.parallel else ""
        tag = text.special_token(form.prefix) if form.prefix else None
        first = "block" if tag is None else f"(<[{tag}]>)? block"
        lines = [f"block: {begin} {rest}", f"calls: call {several}", "call: " + " | ".join(self._calls())]
        if self.required:
            lines.append(f"start: {first} {blocks}")
        elif answer is not None:
            lines += [f"start: answer | {first} {blocks}", f"answer: %json {answer}"]
        elif not form.begin:
            lines += [f"start: {first} | ANY?", r"ANY: /[^{](.|\n)*/"]
        elif text.special_token(form.begin) is not None:
            lines += [f"start: ANY | ANY {begin} {rest} {blocks}", r"ANY: /(.|\n)*/"]
        else:
            # The first that begins a block ends the text before it.
            lines += [f"start: ANY | before {rest} {blocks}", f"before[lazy]: ANY {begin}", r"ANY: /(.|\n)*/"]
        for index, tool in enumerate(self.callable):
            head = " ".join(_literal(part, text) for part in _merged(form.head + tool.name, form.middle, text))
            schema = schema_text(tool.arguments, lenient and not tool.strict)
            lines.append(f"call_{index}: {head} %json {schema} {_literal(form.tail, text)}")
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]})

    def _calls(self) -> list[str]:
        return [f"call_{index}" for index in range(len(self.callable))]


def _merged(head: str, middle: str, text: Tokenizer) -> list[str]:
    """In one literal where it can be: names may begin alike."""
    return [head, middle] if text.special_token(middle) is not None else [head + middle]


def _literal(part: str, text: Tokenizer) -> str:
    """A control token, or a string of the grammar."""
    token = text.special_token(part) if part else None
    return f"<[{token}]>" if token is not None else json.dumps(part) if part else ""


def tool_use(form: ToolFormat | None, tools: Any, choice: Any = "auto", parallel: Any = True) -> ToolUse | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's interface ask for; None: no tools.

    InputError: what is none of those.  UnsupportedError: the model calls no tools.
    """
    read = tools_of(tools)
    flag("parallel_tool_calls", parallel)
    named = _chosen(choice, read)
    if not read or choice == "none":
        return None
    if form is None:
        raise UnsupportedError("tools: the chat template of this model has no format for calls that is known here")
    return ToolUse(form, read, named or read, required=choice == "required" or bool(named), parallel=parallel and not named)


def tools_of(tools: Any) -> tuple[Tool, ...]:
    """InputError: no list of tools in OpenAI's shape, more than 128, or two with one name."""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)) or len(tools) > MAX_TOOLS:
        raise InputError(f"tools is not a list of at most {MAX_TOOLS}")
    read = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    if len({tool.name for tool in read}) < len(read):
        raise InputError("tools: two of them have the same name")
    return read


def _tool(tool: Any, at: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise InputError(f'{at}: expected {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}')
    function = tool["function"]
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise InputError(f"{at}: a name has 1 to 128 letters, digits, _ or -, not {str(name)[:40]!r}")
    if not isinstance(description, (str, type(None))) or not isinstance(strict, (bool, type(None))):
        raise InputError(f"{at}: description is a string, and strict true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InputError(f"{at}: parameters is a JSON Schema of type object")
    try:
        schema_text(parameters)
    except InputError as error:
        raise InputError(f"{at}: {error}") from None
    return Tool(name, description, parameters, bool(strict))


def _chosen(choice: Any, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tool that has to be called; none: the choice is the model's, or there is none."""
    if choice is None or (isinstance(choice, str) and choice in CHOICES):
        if choice == "required" and not tools:
            raise InputError("tool_choice is required, and there are no tools")
        return ()
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    found = tuple(tool for tool in tools if tool.name == name)
    if not found:
        expected = f'{", ".join(CHOICES)}, or {{"type": "function", "function": {{"name": ...}}}} with the name of a tool'
        raise InputError(f"tool_choice is {str(choice)[:80]}; expected {expected}")
    return found


def constraint_of(
    response_format: ResponseFormat | None, compile: Compile, text: Tokenizer, use: ToolUse | None = None
) -> Constraint | None:
    """What an answer is held to, compiled; None: nothing.  Errors are those of its parts."""
    if use:
        return use.compiled(compile, text, response_format)
    grammar = grammar_of(response_format)
    return None if grammar is None else compile(grammar)


def conversation(messages: Any, use: ToolUse | None) -> tuple[Any, dict[str, Any]]:
    """Messages, and variables of the template, with the tools where the template reads them.

    Arguments of earlier calls, which OpenAI's interface has as text, become objects.  InputError: they are no JSON object.
    """
    if isinstance(messages, (list, tuple)):
        messages = [_as_read(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if use is None:
        return messages, {}
    shown = [tool.shown() for tool in use.shown]
    if use.form.tools_in == "variable" or not isinstance(messages, list):
        return messages, {"tools": shown}
    has_system = bool(messages) and isinstance(messages[0], Mapping) and messages[0].get("role") == "system"
    system, rest = (messages[0], messages[1:]) if has_system else ({"role": "system", "content": ""}, messages)
    return [{**system, "tools": json.dumps([tool["function"] for tool in shown])}, *rest], {}


def _as_read(message: Any, at: str) -> Any:
    """A message as templates read it."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if not isinstance(calls, (list, tuple)):
        raise InputError(f"{at}: tool_calls is {str(calls)[:40]}; expected a list of calls")
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(f"{at}.tool_calls[{index}]: a call has a function with a name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):
            raise InputError(f"{at}.tool_calls[{index}].function.arguments: not a JSON object")
        if any(level > MAX_SCHEMA_DEPTH for level, _ in shape(arguments)):
            raise InputError(f"{at}.tool_calls[{index}].function.arguments: nested more than {MAX_SCHEMA_DEPTH} deep")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": read}
