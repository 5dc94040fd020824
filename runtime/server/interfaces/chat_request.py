"""From the fields of a request to the job of a scheduler.  Everything here may take long: it runs on a worker thread."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

from edgeq.errors import EdgeqError, InputError, UnsupportedError
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.answers.constraint import Compile, NotCompiledError
from edgeq.runtime.answers.thinking import Thinking
from edgeq.runtime.answers.tools import ToolUse, conversation, tool_use
from edgeq.runtime.batching.job import Job
from edgeq.runtime.model import Model
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Sampling
from edgeq.runtime.server.errors import ApiError, unsupported
from edgeq.runtime.server.interfaces.fields import OUR_ARGUMENTS, Chat, Completion, GenerationFields, Message
from edgeq.runtime.server.settings import Settings

MAX_PROMPTS = 8
MAX_IMAGES = 8
NORMALIZED = 4
"""Characters of a text for one that its tokenizer sees, where it drops some: more than any does."""
MAX_IMAGE_CHARACTERS = 12 << 20
NO_THINKING = {"enable_thinking": False}
"""For the templates of models that can do without."""
_DATA_URL = re.compile(r"data:image/(?:jpeg|png|webp);base64,", re.IGNORECASE)


@dataclass(frozen=True)
class Asker:
    """Who asks: the client that has turns, and the owner of what is cached; and which model with an adapter, if any."""

    client: str
    owner: str
    model: Model | None = None


def chat_job(model: Model, settings: Settings, fields: Chat, who: Asker) -> Job:
    """InputError, ApiError: what is asked for cannot be had."""
    held = held_format(fields.response_format)
    use = tools_in(model, fields.tools, fields.tool_choice, fields.parallel_tool_calls is not False)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise ApiError(400, "invalid_value", "top_logprobs needs logprobs: true", "top_logprobs")
    given: dict[str, Any] = dict(fields.chat_template_kwargs or {})
    if ours := OUR_ARGUMENTS & set(given):
        raise ApiError(400, "invalid_value", f"{sorted(ours)[0]} cannot be given to the template", "chat_template_kwargs")
    budget = budget_of(fields)
    if fields.reasoning_effort is not None:
        given["reasoning_effort"] = fields.reasoning_effort
        if fields.reasoning_effort == "none":
            given, budget = NO_THINKING | given, 0
    messages, images = list[dict[str, Any]](), list[Picture]()
    for index, message in enumerate(fields.messages):
        content, seen = content_of(model, message, f"messages[{index}].content")
        images += seen
        if len(images) > MAX_IMAGES:
            raise ApiError(400, "invalid_image", f"more than {MAX_IMAGES} images", f"messages[{index}].content")
        read: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
        if message.role == "assistant" and message.tool_calls:
            read["tool_calls"] = message.tool_calls
        elif message.role == "tool":
            read |= {"tool_call_id": message.tool_call_id or "", "name": message.name or ""}
        if message.role == "assistant" and message.reasoning_content:
            read["reasoning_content"] = message.reasoning_content
        messages.append(read)
    prompt = rendered(model, messages, images, given, use)
    top = (fields.top_logprobs or 0) if fields.logprobs else None
    most, thinking = fields.max_completion_tokens or fields.max_tokens, model.prompts.thinking(prompt, budget)
    return job(model, settings, fields, prompt, who, logprobs=top, most=most, response_format=held, use=use, thinking=thinking)


def budget_of(fields: Chat) -> int | None:
    """Tokens that may be thought; None: any number.  Both names are in use: the first is vLLM's, the second llama.cpp's."""
    first, second = fields.thinking_token_budget, fields.thinking_budget_tokens
    if first is not None and second is not None:
        message = "thinking_budget_tokens is another name of thinking_token_budget; send one"
        raise ApiError(400, "invalid_value", message, "thinking_budget_tokens")
    found = second if first is None else first
    return None if found == -1 else found


def held_format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    """What an answer is held to; None: to nothing.  ApiError: a type that is not there."""
    if asked is None or asked.get("type") == "text":
        return None
    if asked.get("type") not in ("json_object", "json_schema"):
        message = f"response_format has type {str(asked.get('type'))[:40]!r}; there are text, json_object and json_schema"
        raise ApiError(400, "invalid_value", message, "response_format")
    return asked


def tools_in(model: Model, tools: Any, choice: Any, parallel: bool) -> ToolUse | None:
    """Which tools an answer may call; None: none.  ApiError: they cannot be used."""
    try:
        return tool_use(model.template.tool_format if model.template else None, tools, choice, parallel)
    except InputError as error:
        param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise ApiError(400, "invalid_value", str(error).replace("`", ""), param) from None
    except UnsupportedError as error:
        raise unsupported("tools", str(error).removeprefix("tools: ")) from None


def rendered(
    model: Model, messages: list[dict[str, Any]], images: list[Picture], given: dict[str, Any], use: ToolUse | None = None
) -> Prompt:
    """The prompt of a conversation."""
    if model.template is None:
        raise ApiError(400, "unsupported_endpoint", "the model has no chat template; serve it with --chat-template FILE")
    try:
        told, shown = conversation(messages, use)
    except InputError as error:
        raise ApiError(400, "invalid_value", str(error), "messages") from None
    check_characters(model, _characters(told) + _characters(shown), "messages")
    return model.chat_prompt(told, images, **given, **shown)


def _characters(value: Any) -> int:
    """Characters that a template may write of messages and tools: strings, names, numbers; one for each other value.

    Without recursion: arguments of calls, which come as text, can be nested deeply.
    """
    count, left = 0, [value]
    while left:
        each = left.pop()
        count += 1
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            left += each
        else:
            count += len(str(each))
    return count


def check_characters(model: Model, count: int, param: str) -> None:
    """ApiError: so many characters are more than the context holds, whatever their tokens are; counting those takes long."""
    if count > NORMALIZED * model.context * model.text.longest_token:
        message = (
            f"This model's maximum context length is {model.context} tokens. However, your {param} have {count} characters."
        )
        raise ApiError(400, "context_length_exceeded", message, param)


def completion_jobs(model: Model, settings: Settings, fields: Completion, who: Asker) -> list[Job]:
    """One for each prompt."""
    if fields.echo:
        raise unsupported("echo", "the prompt is not repeated")
    prompts = fields.prompt
    if isinstance(prompts, str):
        several: list[Any] = [prompts]
    elif not prompts:
        raise ApiError(400, "invalid_value", "there is no prompt", "prompt")
    else:
        several = prompts if isinstance(prompts[0], (str, list)) else [prompts]
    if len(several) > MAX_PROMPTS or (len(several) > 1 and (fields.n or 1) > 1):
        raise ApiError(400, "invalid_value", f"at most {MAX_PROMPTS} prompts, and of several one text each", "prompt")
    if any(type(each) is not type(several[0]) or not each for each in several):
        raise ApiError(400, "invalid_value", "prompts are strings, or lists of token ids, and none is empty", "prompt")
    check_characters(model, sum(len(each) for each in several if isinstance(each, str)), "prompt")
    read = [model.prompt(each) for each in several]
    return [
        job(model, settings, fields, prompt, who, logprobs=fields.logprobs, most=fields.max_tokens, chat=False)
        for prompt in read
    ]


def job(
    model: Model,
    settings: Settings,
    fields: GenerationFields,
    prompt: Prompt,
    who: Asker,
    *,
    logprobs: int | None,
    most: int | None,
    response_format: dict[str, Any] | None = None,
    use: ToolUse | None = None,
    thinking: Thinking | None = None,
    chat: bool = True,
) -> Job:
    """A job, whose grammar may have to be compiled before it is submitted (Request.waits).

    `most` tokens; None: as many as the context has room for.  `response_format`: what the answer is held to;  use: tools in it;
    thinking: what comes before it;  chat: it is drawn as chats are.
    """
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "invalid_value", "stream_options goes with stream: true", "stream_options")
    n = fields.n or 1
    if n > min(settings.most_texts, settings.seats + settings.queue):
        raise ApiError(400, "invalid_value", f"n is {n}; at most {settings.most_texts} texts can be had", "n")
    length, context = len(prompt.tokens), model.context
    if length >= context:
        message = (
            f"This model's maximum context length is {context} tokens. However, your messages resulted in {length} tokens."
        )
        raise ApiError(400, "context_length_exceeded", message, "messages" if isinstance(fields, Chat) else "prompt")
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    most = min(most or context, context - length)
    if fields.min_tokens and fields.min_tokens > most:
        raise ApiError(400, "invalid_value", f"min_tokens is {fields.min_tokens}; at most {most} can come", "min_tokens")
    request = Request(
        max_tokens=most,
        stop=stop,
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        response_format=response_format,
        tools=use,
        thinking=thinking,
    )
    try:
        sampling = sampling_of(model, fields, chat)
        request.check(model.config.vocab_size)
        Request(sampling).check(model.config.vocab_size)
    except InputError as error:
        raise ApiError(400, "invalid_value", str(error).replace("`", "")) from None
    made = Job(prompt, request, sampling, n, who.client, who.owner, who.model)
    try:
        return compiled(model, made, model.constraints.recall)
    except NotCompiledError:
        return made


def compiled(model: Model, job: Job, compile: Compile) -> Job:
    """The job with what its texts are held to, which may take seconds.  ApiError: that cannot be used."""
    request = job.request
    try:
        request = request.compiled(compile, model.text)
    except InputError as error:
        param = "tools" if request.tools and not request.response_format else "response_format"
        raise ApiError(400, "invalid_schema", str(error).replace("`", ""), param) from None
    try:
        request.check(model.config.vocab_size)
    except InputError as error:
        raise ApiError(400, "invalid_value", str(error).replace("`", "")) from None
    return replace(job, request=request)


def sampling_of(model: Model, fields: GenerationFields, chat: bool) -> Sampling:
    """What is asked for, then what the file recommends, then what is usual in chats (Sampling.recommended), and in completions
    temperature 1, which clients of this interface expect.
    """
    given: dict[str, Any] = {"seed": secrets.randbits(63) if fields.seed is None else fields.seed % (1 << 64)}
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "dry_multiplier"):
        if getattr(fields, name) is not None:
            given[name] = getattr(fields, name)
    if fields.repetition_penalty is not None and fields.repeat_penalty is not None:
        raise ApiError(400, "invalid_value", "repeat_penalty is another name of repetition_penalty; send one", "repeat_penalty")
    penalty = fields.repetition_penalty if fields.repetition_penalty is not None else fields.repeat_penalty
    if penalty is not None:
        given["repeat_penalty"] = penalty
    if fields.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in fields.logit_bias.items()}
    found = Sampling.recommended(model, chat, **given)
    if found.temperature == 0 and "temperature" not in given and model.file.metadata.generation.get("temperature") is None:
        return replace(found, temperature=1.0)
    return found


def content_of(model: Model, message: Message, at: str) -> tuple[Any, list[Picture]]:
    """What the template gets, and the pictures in it."""
    if message.content is None or isinstance(message.content, str):
        return message.content or "", []
    parts, images = list[dict[str, str]](), list[Picture]()
    for index, part in enumerate(message.content):
        where = f"{at}[{index}]"
        if part.type in ("text", "input_text") and part.text is not None:
            parts.append({"type": "text", "text": part.text})
        elif part.type == "image_url" and part.image_url is not None:
            url = part.image_url.get("url") if isinstance(part.image_url, dict) else part.image_url
            images.append(picture_of(model, url, where))
            parts.append({"type": "image"})
        else:
            raise ApiError(400, "invalid_value", f"{where}: a part is text or image_url, not {part.type[:40]!r}", where)
    if images:
        return parts, images
    return "".join(part["text"] for part in parts), images


def picture_of(model: Model, url: Any, at: str) -> Picture:
    """The picture of a data URL.  A server that fetched others would send requests for whoever asks (CVE-2026-24779)."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ApiError(400, "image_url_not_allowed", f"{at}: images come as data:image/png;base64,...; nothing is fetched", at)
    head = _DATA_URL.match(url)
    if not head or len(url) > MAX_IMAGE_CHARACTERS:
        raise ApiError(
            400, "invalid_image", f"{at}: expected image/jpeg, image/png or image/webp in base64, at most 12 MiB", at
        )
    return read_picture(model, url[head.end() :], at)


def read_picture(model: Model, data: str, at: str) -> Picture:
    """The picture of base64."""
    try:
        decoded = base64.b64decode(data, validate=True)
        # Whatever a client says it is: other readers are not for strangers.
        if not decoded.startswith((b"\x89PNG", b"\xff\xd8\xff")) and (decoded[:4], decoded[8:12]) != (b"RIFF", b"WEBP"):
            raise ApiError(400, "invalid_image", f"{at}: not a JPEG, PNG or WebP picture", at)
        return model.read_image(decoded)
    except binascii.Error:
        raise ApiError(400, "invalid_image", f"{at}: not base64", at) from None
    except EdgeqError as error:
        raise ApiError(400, "invalid_image", f"{at}: {error}", at) from None
