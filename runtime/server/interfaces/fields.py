"""Fields of requests with their types and bounds: what a client may send, and what is refused by name."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from edgeq.runtime.server.errors import ApiError, unsupported

MAX_DEPTH = 64
MAX_NAMED_FIELDS = 8
IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
    )
    + ("prediction", "cache_salt")
)
"""Fields that change no answer of ours."""
REFUSED = {
    "tools": "only chats have tools",
    "tool_choice": "only chats have tools",
    "functions": "pass tools",
    "function_call": "pass tool_choice",
    "chat_template": "templates come from the server, never from a request",
    "audio": "this server gives text alone",
    "web_search_options": "this server searches nothing",
    "suffix": "models of this server continue a text, they do not fill it in",
}
_EMPTY: tuple[Any, ...] = (None, [], {}, "none", False, "")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_AT = re.compile(r" - at `([^`]*)`$")

LongText = Annotated[str, Meta(max_length=1 << 22)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Budget = Annotated[int, Meta(ge=-1, le=1 << 31)]
"""Tokens of thinking; -1: any number, as vLLM and llama.cpp have it."""
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Meta(max_length=16)]
Biases = dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]]
KwargName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,39}$")]
Kwargs = dict[KwargName, bool | int | Annotated[str, Meta(max_length=256)]]
OUR_ARGUMENTS = {
    "messages",
    "tools",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "documents",
    "images",
    "variables",
    "self",
}


class StreamOptions(Struct):
    include_usage: bool | None = None


class ContentPart(Struct):
    """A piece of a message: text, or a picture."""

    type: Annotated[str, Meta(max_length=40)]
    text: LongText | None = None
    image_url: dict[str, Any] | LongText | None = None


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: LongText | Annotated[list[ContentPart], Meta(max_length=256)] | None = None
    name: Annotated[str, Meta(max_length=64)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=128)] | None = None
    reasoning_content: LongText | None = None


class GenerationFields(Struct, kw_only=True):
    """What completions and chats have in common."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    logit_bias: Annotated[Biases, Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Chat(GenerationFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=20)] | None = None
    modalities: list[Literal["text"]] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: Annotated[Kwargs, Meta(max_length=16)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: Annotated[str, Meta(max_length=40)] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None


class Completion(GenerationFields, kw_only=True):
    prompt: LongText | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


T = TypeVar("T", bound=Struct)


def decoded(body: bytes | bytearray) -> dict[str, Any]:
    """The object in a body.  ApiError: no JSON, no object, or nested too deeply."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON that can be read: {str(error)[:200]}") from None
    # Brackets bound the depth from above, and few bodies have so many.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(found) > MAX_DEPTH:
        raise ApiError(400, "invalid_json", f"the body is nested more than {MAX_DEPTH} deep")
    if not isinstance(found, dict):
        raise ApiError(400, "invalid_json", "the body is no JSON object")
    return found


def fields(kind: type[T], body: dict[str, Any]) -> tuple[T, list[str]]:
    """The fields of a body, and the names of those that are not known.

    ApiError: one is missing, of the wrong type, out of its bounds, or would change the answer in a way that is not there.
    """
    known = set(kind.__struct_fields__)
    for name, why in REFUSED.items():
        if name in body and name not in known and body[name] not in _EMPTY:
            raise unsupported(name, why)
    try:
        found = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message, at = str(error), _AT.search(str(error))
        missing = "missing required field" in message
        param = at[1].removeprefix("$.") if at else None
        if missing and not at:
            param = message.split("`")[1]
        raise ApiError(400, "missing_field" if missing else "invalid_value", message[:300].replace("$.", ""), param) from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from None
    known |= IGNORED | set(REFUSED)
    return found, [name for name in body if name not in known]


def named(unknown: list[str]) -> str:
    """For the header that names what was ignored; only what is harmless in one."""
    return (
        ", ".join(name for name in unknown if _NAME.fullmatch(name)) if len(unknown) <= MAX_NAMED_FIELDS else str(len(unknown))
    )


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH:
        level = [
            each
            for parent in level
            if isinstance(parent, (dict, list))
            for each in (parent.values() if isinstance(parent, dict) else parent)
        ]
        deepest += 1
    return deepest
