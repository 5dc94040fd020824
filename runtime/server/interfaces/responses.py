"""OpenAI's responses: requests become chats, and answers take their shapes.  Nothing is stored, so none can be continued."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from edgeq.runtime.batching.job import Job
from edgeq.runtime.model import Model
from edgeq.runtime.server.errors import ApiError, unsupported
from edgeq.runtime.server.interfaces.chat_request import Asker, chat_job
from edgeq.runtime.server.interfaces.fields import Chat, ContentPart, Count, LongText, Message
from edgeq.runtime.server.settings import Settings

LOGPROBS = "message.output_text.logprobs"
REFUSED = {
    "previous_response_id": "this server keeps no answers; send the whole conversation as input",
    "conversation": "this server keeps no conversations; send the whole conversation as input",
    "prompt": "this server keeps no prompts; send the text as input",
    "background": "this server keeps no answers to ask for later; leave it out, or stream",
}
_MESSAGE = re.compile(r"messages\[(\d+)\]")


class Content(Struct):
    """A piece of a message."""

    type: Annotated[str, Meta(max_length=40)]
    text: LongText | None = None
    image_url: LongText | None = None


class Item(Struct):
    """A message; what comes without a type is one too."""

    type: Annotated[str, Meta(max_length=40)] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: LongText | Annotated[list[Content], Meta(max_length=256)] | None = None
    call_id: Annotated[str, Meta(max_length=128)] | None = None
    name: Annotated[str, Meta(max_length=128)] | None = None
    arguments: LongText | None = None
    output: LongText | Annotated[list[Content], Meta(max_length=256)] | None = None


class TextSettings(Struct):
    format: dict[str, Any] | None = None


class Reasoning(Struct):
    effort: Annotated[str, Meta(max_length=20)] | None = None


class Responses(Struct, kw_only=True):
    input: LongText | Annotated[list[Item], Meta(min_length=1, max_length=1024)]
    model: Annotated[str, Meta(max_length=256)] | None = None
    instructions: LongText | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: Annotated[str, Meta(max_length=40)] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None


def responses_job(model: Model, settings: Settings, fields: Responses, who: Asker) -> Job:
    """InputError, ApiError: what is asked for cannot be had."""
    for name, why in REFUSED.items():
        if getattr(fields, name):
            raise unsupported(name, why)
    messages, items = list[Message](), list[int]()
    if fields.instructions:
        messages.append(Message("system", fields.instructions))
        items.append(-1)
    given = [Item(role="user", content=fields.input)] if isinstance(fields.input, str) else fields.input
    for index, item in enumerate(given):
        if item.type == "reasoning":
            # Clients send back what came before; templates leave the reasoning of earlier answers out.
            continue
        message = _message(item, f"input[{index}]")
        if message.tool_calls and messages and messages[-1].role == "assistant":
            # Calls of one answer are items of their own here.
            messages[-1].tool_calls = [*(messages[-1].tool_calls or []), *message.tool_calls]
            continue
        messages.append(message)
        items.append(index)
    wanted = LOGPROBS in (fields.include or []) or bool(fields.top_logprobs)
    chat = Chat(
        messages=messages,
        max_completion_tokens=fields.max_output_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        logprobs=wanted,
        top_logprobs=(fields.top_logprobs or 0) if wanted else None,
        reasoning_effort=fields.reasoning.effort if fields.reasoning else None,
        response_format=_response_format(fields.text),
        tools=[_nested(tool) for tool in fields.tools or []],
        tool_choice=_nested(fields.tool_choice) if isinstance(fields.tool_choice, dict) else fields.tool_choice,
        parallel_tool_calls=fields.parallel_tool_calls,
    )
    try:
        return chat_job(model, settings, chat, who)
    except ApiError as error:
        raise renamed(error, items) from None


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool, or the choice of one, in the shape of chats, which have the function one level deeper."""
    if tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _message(item: Item, at: str) -> Message:
    if item.type == "function_call":
        if item.call_id is None or item.name is None or item.arguments is None:
            raise ApiError(400, "missing_field", f"{at}: a function_call has call_id, name and arguments", at)
        function = {"name": item.name, "arguments": item.arguments}
        return Message("assistant", tool_calls=[{"id": item.call_id, "type": "function", "function": function}])
    if item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            raise ApiError(400, "missing_field", f"{at}: a function_call_output has call_id and output", at)
        texts = [item.output] if isinstance(item.output, str) else [part.text for part in item.output]
        if not all(isinstance(text, str) for text in texts):
            raise ApiError(400, "invalid_value", f"{at}: the output of a function is text", at)
        return Message("tool", "".join(text or "" for text in texts), tool_call_id=item.call_id)
    if item.type != "message":
        known = "a message, function_call, function_call_output or reasoning"
        raise ApiError(400, "invalid_value", f"{at}: an item is {known}, not {item.type[:40]!r}", at)
    if item.role is None or item.content is None:
        raise ApiError(400, "missing_field", f"{at}: a message has a role and content", at)
    if isinstance(item.content, str):
        return Message(item.role, item.content)
    parts = list[ContentPart]()
    for index, content in enumerate(item.content):
        where = f"{at}.content[{index}]"
        if content.type in ("input_text", "output_text") and content.text is not None:
            parts.append(ContentPart("text", content.text))
        elif content.type == "input_image" and content.image_url is not None:
            parts.append(ContentPart("image_url", image_url=content.image_url))
        else:
            message = f"{where}: a part is input_text, output_text or input_image with image_url, not {content.type[:40]!r}"
            raise ApiError(400, "invalid_value", message, where)
    return Message(item.role, parts)


def _response_format(text: TextSettings | None) -> dict[str, Any] | None:
    """The same in the shape of chats, which have the schema one level deeper."""
    found = text.format if text else None
    if not found or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {name: value for name, value in found.items() if name != "type"}}


def renamed(error: ApiError, items: Sequence[int] = ()) -> ApiError:
    """An error about a chat in the words of the request that it was made from."""

    def name(text: str) -> str:
        def input_of(match: re.Match[str]) -> str:
            index = items[int(match[1])] if int(match[1]) < len(items) else -1
            return "instructions" if index < 0 else f"input[{index}]"

        return _MESSAGE.sub(input_of, text).replace("response_format", "text.format")

    param = "input" if error.param == "messages" else error.param and name(error.param)
    return ApiError(error.status, error.code, name(error.message), param, error.headers)
