"""langchain-openai against a server: python of_langchain.py URL MODEL; what came is printed as JSON."""

import json
import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]
ASKED = [HumanMessage("How is the weather in Oslo?")]


class Point(BaseModel):
    """A point."""

    x: int = Field(ge=0, le=99)
    up: bool


def get_weather(city: str, days: int) -> str:
    """What the weather is."""
    return f"{city} {days}"


def client(**options: Any) -> ChatOpenAI:
    given = {"base_url": URL, "api_key": "none", "model": MODEL, "temperature": 1.0, "max_retries": 0, "max_tokens": 100}
    return ChatOpenAI(**{**given, "seed": 5, **options})


def refused(**options: Any) -> list[Any]:
    try:
        client(**options).invoke(ASKED)
    except openai.APIStatusError as error:
        return [error.status_code, error.code]
    return ["answered"]


def main() -> None:
    found: dict[str, Any] = {}
    chat = client(max_tokens=12)
    whole = chat.invoke(ASKED)
    found["whole"], found["tokens"] = whole.content, whole.usage_metadata["output_tokens"]
    chunks = list(client(max_tokens=12, stream_usage=True).stream(ASKED))
    found["streamed"] = "".join(str(chunk.content) for chunk in chunks)
    found["streamed_tokens"] = sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks)

    bound = client(max_tokens=300).bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    called = bound.invoke(ASKED)
    (call,) = called.tool_calls
    found["call"] = [call["name"], sorted(call["args"])]
    streamed = None
    for chunk in bound.stream(ASKED):
        streamed = chunk if streamed is None else streamed + chunk
    found["same_call"] = [each["args"] for each in streamed.tool_calls] == [call["args"]]
    after = chat.bind_tools([get_weather], tool_choice="none").invoke(
        [*ASKED, called, ToolMessage("fine", tool_call_id=call["id"])]
    )
    found["after"] = [isinstance(after.content, str), after.tool_calls]

    for method in ("json_schema", "function_calling"):
        point = client().with_structured_output(Point, method=method).invoke(ASKED)
        found[method] = isinstance(point, Point)
    responses = client(use_responses_api=True, seed=None, max_tokens=12)
    found["responses"] = [bool(responses.invoke(ASKED).text), bool("".join(chunk.text for chunk in responses.stream(ASKED)))]

    found["refused"] = [refused(model="gpt-4"), refused(temperature=9.0), refused(max_tokens=-1)]
    for _ in client(max_tokens=800, model_kwargs={"extra_body": {"ignore_eos": True}}).stream(ASKED):
        break
    print(json.dumps(found))


main()
