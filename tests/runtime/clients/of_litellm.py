"""litellm against a server: python of_litellm.py URL MODEL; what came is printed as JSON."""

import json
import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1:]
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
PROPERTIES = {"city": {"enum": ["Oslo", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
WEATHER = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "What the weather is.", "parameters": WEATHER}}
HELD = {"type": "json_schema", "json_schema": {"name": "asked", "strict": True, "schema": WEATHER}}


def ask(**options: Any) -> Any:
    given = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "messages": ASKED, "num_retries": 0}
    return litellm.completion(**{**given, "temperature": 1.0, "seed": 5, "max_tokens": 100, **options})


def refused(**options: Any) -> list[Any]:
    try:
        ask(**options)
    except litellm.exceptions.APIError as error:
        return [error.status_code]
    except (litellm.exceptions.NotFoundError, litellm.exceptions.BadRequestError) as error:
        return [error.status_code]
    return ["answered"]


def main() -> None:
    found: dict[str, Any] = {}
    whole = ask(max_tokens=12)
    found["whole"], found["tokens"] = whole.choices[0].message.content, whole.usage.completion_tokens
    text, usage = "", None
    for chunk in ask(max_tokens=12, stream=True, stream_options={"include_usage": True}):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = getattr(chunk, "usage", None) or usage
    found["streamed"], found["streamed_tokens"] = text, usage.completion_tokens if usage else 0

    called = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = called.message.tool_calls
    found["call"] = [call.function.name, sorted(json.loads(call.function.arguments)), called.finish_reason]
    result = {"role": "tool", "tool_call_id": call.id, "content": "fine"}
    after = ask(messages=[*ASKED, called.message.model_dump(), result], tools=[TOOL], tool_choice="none", max_tokens=8)
    found["after"] = isinstance(after.choices[0].message.content, str)
    chunks = list(ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASKED)
    found["same_call"] = rebuilt.choices[0].message.tool_calls[0].function.arguments == call.function.arguments

    found["json_schema"] = sorted(json.loads(ask(response_format=HELD).choices[0].message.content))
    found["text"] = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=URL, api_key="none", prompt="def f(", max_tokens=6, seed=3
    ).usage.completion_tokens
    found["refused"] = [refused(model="openai/gpt-4"), refused(temperature=9.0), refused(max_tokens=-1)]
    for _ in ask(max_tokens=800, stream=True, extra_body={"ignore_eos": True}):
        break
    print(json.dumps(found))


main()
