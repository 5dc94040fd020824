"""Anthropic's interface: its requests become chats, and answers take its shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.answers.tools import ToolUse
from edgeq.runtime.batching.job import Job
from edgeq.runtime.model import Model
from edgeq.runtime.server.errors import ApiError, unsupported
from edgeq.runtime.server.interfaces.chat_request import (
    MAX_IMAGE_CHARACTERS,
    MAX_IMAGES,
    NO_THINKING,
    Asker,
    job,
    read_picture,
    rendered,
    tools_in,
)
from edgeq.runtime.server.interfaces.fields import GenerationFields, LongText, Stop
from edgeq.runtime.server.settings import Settings

Name = Annotated[str, Meta(max_length=128)]
MEDIA = ("image/jpeg", "image/png", "image/webp")


class Source(Struct):
    type: Annotated[str, Meta(max_length=40)]
    media_type: Annotated[str, Meta(max_length=40)] | None = None
    data: Annotated[str, Meta(max_length=MAX_IMAGE_CHARACTERS)] | None = None


class ContentBlock(Struct):
    type: Annotated[str, Meta(max_length=40)]
    text: LongText | None = None
    source: Source | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: LongText | Annotated[list[dict[str, Any]], Meta(max_length=256)] | None = None
    thinking: LongText | None = None


Blocks = Annotated[list[ContentBlock], Meta(max_length=256)]


class AnthropicTool(Struct):
    """A tool of the caller; those that Anthropic runs itself have other types."""

    name: Name
    type: Annotated[str, Meta(max_length=40)] | None = None
    description: LongText | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingSettings(Struct):
    """Whether the model may think, and for how many tokens; without it, and with "adaptive", it thinks as it likes."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None


class OutputConfig(Struct):
    format: dict[str, Any] | None = None


class Turn(Struct):
    role: Literal["user", "assistant"]
    content: LongText | Blocks


class CountFields(Struct, kw_only=True):
    """What `count_tokens` reads."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=1024)]
    system: LongText | Blocks | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSettings | None = None


class Messages(CountFields, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    stream: bool | None = None
    output_format: dict[str, Any] | None = None
    output_config: OutputConfig | None = None


def use_of(model: Model, fields: CountFields) -> ToolUse | None:
    """Which tools an answer may call.  ApiError: they cannot be used."""
    tools = list[dict[str, Any]]()
    for index, tool in enumerate(fields.tools or []):
        if tool.type not in (None, "custom"):
            raise unsupported("tools", f"tools[{index}] is of type {tool.type!r}, which Anthropic runs itself")
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
        tools.append({"type": "function", "function": function})
    choice, parallel = fields.tool_choice, True
    asked: Any = "auto"
    if choice is not None:
        parallel = not choice.disable_parallel_tool_use
        named = {"type": "function", "function": {"name": choice.name}}
        asked = {"any": "required", "tool": named}.get(choice.type, choice.type)
    return tools_in(model, tools, asked, parallel)


def prompt_of(model: Model, fields: CountFields, use: ToolUse | None) -> Prompt:
    """InputError, ApiError: what is asked for cannot be had."""
    messages, images = list[dict[str, Any]](), list[Picture]()
    if fields.system is not None:
        messages.append({"role": "system", "content": _content(model, fields.system, images, "system")})
    for index, turn in enumerate(fields.messages):
        messages += _messages(model, turn, images, f"messages[{index}].content")
    return rendered(model, messages, images, NO_THINKING if _disabled(fields) else {}, use)


def _disabled(fields: CountFields) -> bool:
    return fields.thinking is not None and fields.thinking.type == "disabled"


def message_job(model: Model, settings: Settings, fields: Messages, who: Asker) -> Job:
    drawing = GenerationFields(
        max_tokens=fields.max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stop=fields.stop_sequences,
    )
    asked = fields.output_format or (fields.output_config and fields.output_config.format)
    if asked and asked.get("type") != "json_schema":
        raise ApiError(400, "invalid_value", "a format has type json_schema, and a schema", "output_format")
    response_format = {"type": "json_schema", "json_schema": {"schema": asked.get("schema")}} if asked else None
    use = use_of(model, fields)
    prompt, budget = prompt_of(model, fields, use), fields.thinking.budget_tokens if fields.thinking else None
    thinking = model.prompts.thinking(prompt, 0 if _disabled(fields) else budget)
    return job(
        model,
        settings,
        drawing,
        prompt,
        who,
        logprobs=None,
        most=fields.max_tokens,
        response_format=response_format,
        use=use,
        thinking=thinking,
    )


def _messages(model: Model, turn: Turn, images: list[Picture], at: str) -> list[dict[str, Any]]:
    """A turn as a chat has it: results of tools are messages of their own, calls a part of the assistant's."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    found, calls, others, thoughts = list[dict[str, Any]](), list[dict[str, Any]](), list[ContentBlock](), ""
    for index, block in enumerate(turn.content):
        where = f"{at}[{index}]"
        if block.type == "tool_use" and turn.role == "assistant":
            if not block.name or not block.id or block.input is None:
                raise ApiError(400, "missing_field", f"{where}: tool_use has id, name and input", where)
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result" and turn.role == "user":
            if not block.tool_use_id:
                raise ApiError(400, "missing_field", f"{where}: tool_result has a tool_use_id", where)
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "name": "", "content": _result(block.content, where)}
            found.append(result)
        elif block.type in ("thinking", "redacted_thinking") and turn.role == "assistant":
            thoughts += block.thinking or ""
        else:
            others.append(block)
    if others or calls or not found:
        message = {"role": turn.role, "content": _content(model, others, images, at) if others else ""}
        found.append(message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thoughts} if thoughts else {}))
    return found


def _result(content: str | list[dict[str, Any]] | None, at: str) -> str:
    """The text of a tool's result."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "invalid_value", f"{at}: the content of a result is text", at)
    return "".join(str(text) for text in texts)


def _content(model: Model, content: str | list[ContentBlock], images: list[Picture], at: str) -> Any:
    if isinstance(content, str):
        return content
    parts, before = list[dict[str, str]](), len(images)
    for index, block in enumerate(content):
        where = f"{at}[{index}]"
        if block.type == "text" and block.text is not None:
            parts.append({"type": "text", "text": block.text})
        elif block.type == "image" and block.source is not None:
            if block.source.type != "base64":
                raise ApiError(400, "image_url_not_allowed", f"{where}: a picture comes as base64; nothing is fetched", where)
            if block.source.media_type not in MEDIA or not block.source.data or len(images) >= MAX_IMAGES:
                raise ApiError(400, "invalid_image", f"{where}: at most {MAX_IMAGES} pictures, of {', '.join(MEDIA)}", where)
            images.append(read_picture(model, block.source.data, where))
            parts.append({"type": "image"})
        else:
            known = "text or image, tool_use of the assistant or tool_result of the user"
            raise ApiError(400, "invalid_value", f"{where}: a block is {known}, not {block.type[:40]!r}", where)
    return parts if len(images) > before else "".join(part["text"] for part in parts)
