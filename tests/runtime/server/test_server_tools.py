"""Tools and JSON over HTTP, with openai's and anthropic's clients as they are installed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edgeq.runtime import Model, Sampling
from edgeq.runtime.answers.tools import tools_of

pytest.importorskip("prometheus_client")
pytest.importorskip("llguidance")

from tests.runtime.answers.calling import ALL, TEMPLATE, WEATHER  # noqa: E402
from tests.runtime.server.schemas import record  # noqa: E402
from tests.runtime.server.serving import Served, serving  # noqa: E402

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
TOOLS: list[Any] = [WEATHER, ALL]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
CLAUDE: list[Any] = [{"name": name, "description": "x", "input_schema": schema} for name, schema in SCHEMAS.items()]
PERSON = record(name={"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}, age={"type": "integer", "minimum": 0, "maximum": 120})
HELD: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
NOT: dict[str, Any] = {"type": "json_schema", "schema": {"not": {}}}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 100}


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a16", threads=1, threads_prefill=1, context=1024, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model, names=("tiny",)) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(served: Served) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def valid(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.usefixtures("works_here")
def test_answers_are_json_of_the_schema(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASKED, response_format=HELD, n=3, **SAMPLED)
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    chunks = client.chat.completions.create(model="tiny", messages=ASKED, response_format=HELD, stream=True, **SAMPLED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    given: dict[str, Any] = {"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 3}
    assert client.chat.completions.create(model="tiny", messages=ASKED, **given).choices[0].message.content.startswith("{")


@pytest.mark.usefixtures("works_here")
def test_what_a_grammar_leaves_no_choice_about_is_drafted(model: Model, served: Served, client: Any) -> None:
    before, fully = served.ask("/metrics")[2].decode(), {"min_p": 0, "dry_multiplier": 0}
    given: dict[str, Any] = {"model": "tiny", "messages": ASKED, "response_format": HELD, **SAMPLED, "top_p": 1}
    answer = client.chat.completions.create(**given, extra_body=fully)
    after = served.ask("/metrics")[2].decode()
    accepted = [int(float(re.findall(r'edgeq_tokens_total{kind="accepted"} (\S+)', text)[0])) for text in (before, after)]
    assert accepted[1] - accepted[0] > 3
    alone = model.chat(ASKED, max_tokens=100, sampling=Sampling(temperature=1.0, seed=5), response_format=HELD)
    assert answer.choices[0].message.content == alone.text()
    with serving(model, names=("tiny",), draft="lookup", gamma=3) as looks_up:
        assert looks_up.ask(CHAT, given | fully)[2]["choices"][0]["message"]["content"] == alone.text()
        free = {"model": "tiny", "messages": ASKED, **SAMPLED}
        assert looks_up.ask(CHAT, free)[2]["choices"] == served.ask(CHAT, free)[2]["choices"]
        assert sum(looks_up.server.scheduler._speculator.statistics.drafted) > 10


def test_a_schema_that_leaves_no_token_ends_its_text_alone(served: Served) -> None:
    """So many tokens cannot come, and the end may not either."""
    for stream in (False, True):
        asked = {"model": "tiny", "messages": ASKED, "response_format": HELD, **SAMPLED, "min_tokens": 90, "stream": stream}
        status, _, body = served.ask(CHAT, asked)
        assert status == (200 if stream else 400) and "min_tokens" in str(body)
    # What it could say comes before why there is no more.
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    told = [event["choices"][0]["delta"].get("content") or "" for event in events if "choices" in event]
    jsonschema.validate(json.loads("".join(told)), PERSON)
    assert served.ask("/health")[0] == 200 and served.idle()


def test_a_function_has_no_arguments_beyond_those_that_it_names() -> None:
    for given in ({"x": {"type": "integer"}}, {}):
        (tool,) = tools_of([{"type": "function", "function": {"name": "a", "parameters": {"properties": given}}}])
        assert tool.arguments["additionalProperties"] is False
    for more in ({"additionalProperties": True}, {"allOf": [{}]}, {"required": ["y"]}, {"required": 5}, {"required": [{}]}):
        parameters = {"properties": {"x": {"type": "integer"}}, **more}
        (tool,) = tools_of([{"type": "function", "function": {"name": "a", "parameters": parameters}}])
        assert tool.arguments == {"type": "object", **parameters}
    (anything,) = tools_of([{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}])
    assert anything.arguments == {"type": "object"}


def test_a_client_parses_what_it_asked_for(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    kind = pydantic.create_model("Point", x=(int, pydantic.Field(ge=0, le=99)), up=(bool, ...))
    answer = client.chat.completions.parse(model="tiny", messages=ASKED, response_format=kind, **SAMPLED)
    parsed = answer.choices[0].message.parsed
    assert 0 <= parsed.x <= 99 and parsed.up in (True, False)


@pytest.mark.usefixtures("works_here")
def test_calls_and_their_results(client: Any) -> None:
    given: dict[str, Any] = {"model": "tiny", "tools": TOOLS, **SAMPLED}
    answer = client.chat.completions.create(messages=ASKED, tool_choice="required", parallel_tool_calls=False, **given)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    valid([(call.function.name, call.function.arguments)])
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    after = client.chat.completions.create(messages=[*ASKED, choice.message, result], tool_choice="none", **given)
    assert after.choices[0].message.tool_calls is None and after.usage.prompt_tokens > 40
    named = {"type": "function", "function": {"name": "get_weather_all"}}
    answer = client.chat.completions.create(messages=ASKED, tool_choice=named, **given)
    assert [each.function.name for each in answer.choices[0].message.tool_calls] == ["get_weather_all"]


@pytest.mark.usefixtures("works_here")
def test_a_stream_of_calls_is_the_whole_answer_in_pieces(client: Any) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "tool_choice": "required", **SAMPLED}
    whole = client.chat.completions.create(**given).choices[0]
    calls: dict[int, list[str]] = {}
    reasons = []
    for chunk in client.chat.completions.create(stream=True, **given):
        delta = chunk.choices[0].delta
        for call in delta.tool_calls or []:
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.arguments == ""
                calls[call.index] = [call.function.name, ""]
            else:
                assert call.id is None and call.function.name is None
                calls[call.index][1] += call.function.arguments
        reasons.append(chunk.choices[0].finish_reason)
    found = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert [tuple(call) for call in calls.values()] == found and sorted(calls) == list(range(len(found)))
    assert reasons[-1] == whole.finish_reason and set(reasons[:-1]) == {None}
    if whole.finish_reason == "tool_calls":
        valid(found)
    with client.chat.completions.stream(**given | {"parallel_tool_calls": False}) as stream:
        final = stream.get_final_completion().choices[0]
    valid([(call.function.name, call.function.arguments) for call in final.message.tool_calls])


def test_a_choice_of_the_model_may_be_text(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, temperature=0, max_tokens=20)
    assert answer.choices[0].finish_reason in ("length", "stop") and answer.choices[0].message.content


@pytest.mark.usefixtures("works_here")
def test_tools_of_anthropic(claude: Any) -> None:
    given: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 150,
        "messages": ASKED,
        "tools": CLAUDE,
        "extra_body": {"temperature": 0},
    }
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = claude.messages.create(tool_choice=choice, **given)
    (block,) = answer.content
    assert answer.stop_reason == "tool_use" and block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMAS[block.name])
    with claude.messages.stream(tool_choice=choice, **given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].input == block.input and final.stop_reason == "tool_use"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1 and "input_json" in kinds
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "21 degrees"}]}
    turns = [
        *ASKED,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    after = claude.messages.create(**given | {"messages": turns, "max_tokens": 5, "tool_choice": {"type": "none"}})
    assert after.content[0].type == "text"
    counted = claude.messages.count_tokens(model="tiny", messages=turns, tools=CLAUDE)
    assert counted.input_tokens > after.usage.input_tokens
    named = claude.messages.create(tool_choice={"type": "tool", "name": "get_weather_all"}, **given)
    assert [each.name for each in named.content] == ["get_weather_all"]


def test_an_output_format_of_anthropic(claude: Any, served: Served) -> None:
    form = {"type": "json_schema", "schema": PERSON}
    answer = claude.messages.create(
        model="tiny", max_tokens=150, messages=ASKED, output_config={"format": form}, extra_body={"temperature": 0}
    )
    jsonschema.validate(json.loads(answer.content[0].text), PERSON)
    status, _, body = served.ask(MESSAGES, {"messages": ASKED, "max_tokens": 150, "temperature": 0, "output_format": form})
    assert status == 200 and body["content"][0]["text"] == answer.content[0].text


@pytest.mark.usefixtures("works_here")
def test_calls_in_responses(client: Any) -> None:
    tools = [{"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()]
    given: dict[str, Any] = {"model": "tiny", "tools": tools, "temperature": 0, "max_output_tokens": 150}
    asked = {"input": ASKED, "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.responses.create(**asked, **given)
    (call,) = answer.output
    assert call.type == "function_call" and answer.status == "completed" and call.call_id.startswith("call_")
    valid([(call.name, call.arguments)])
    with client.responses.stream(**asked, **given) as stream:
        events = list(stream)
        final = stream.get_final_response()
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments == final.output[0].arguments and len(pieces) > 1
    assert [event.type for event in events].count("response.output_item.done") == 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    turns = [*ASKED, call.model_dump(exclude_none=True), result]
    after = client.responses.create(input=turns, **given | {"tool_choice": "none", "max_output_tokens": 4})
    assert after.output[0].type == "message" and after.usage.input_tokens > answer.usage.input_tokens - 150
    named = client.responses.create(input=ASKED, tool_choice={"type": "function", "name": "get_weather_all"}, **given)
    assert {each.name for each in named.output} == {"get_weather_all"}
    held = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    text = client.responses.create(model="tiny", input=ASKED, text=held, temperature=0, max_output_tokens=150).output_text
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.usefixtures("works_here")
def test_seeds_hold_beside_others(client: Any) -> None:
    """A text that is held has the same tokens alone, and beside others that are held to something else."""

    def ask(form: dict[str, Any]) -> str:
        return str(
            client.chat.completions.create(model="tiny", messages=ASKED, response_format=form, **SAMPLED)
            .choices[0]
            .message.content
        )

    forms = [HELD, {"type": "json_schema", "json_schema": {"name": "n", "schema": record(a={"type": "boolean"})}}]
    alone, together = [ask(form) for form in forms], dict[int, str]()

    def run(index: int) -> None:
        together[index] = ask(forms[index % 2])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(4)] == alone * 2


def schema(found: Any) -> dict[str, Any]:
    return {"messages": ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": found}}}


def function(**found: Any) -> dict[str, Any]:
    return {"messages": ASKED, "tools": [{"type": "function", "function": {"name": "f", **found}}]}


def deep(levels: int) -> Any:
    found: Any = {"type": "boolean"}
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


@pytest.mark.parametrize(
    ("path", "body", "code", "named"),
    [
        (CHAT, schema({"not": {}}), "invalid_schema", "not"),
        (CHAT, schema({"$ref": "#"}), "invalid_schema", "satisfy"),
        (CHAT, schema({"$ref": "http://127.0.0.1/x"}), "invalid_schema", "127.0.0.1"),
        (CHAT, schema({"$ref": "file:///etc/passwd"}), "invalid_schema", "passwd"),
        (CHAT, schema(deep(25)), "ok", ""),
        (CHAT, schema(deep(70)), "invalid_json", "64"),
        (CHAT, schema({"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}), "invalid_schema", "500|charac"),
        (CHAT, schema({"type": "string", "pattern": "(" * 3000}), "invalid_schema", "regex|cannot"),
        (CHAT, schema({"x-guidance": {"lenient": True}}), "invalid_schema", "x-guidance"),
        (CHAT, {"messages": ASKED, "response_format": {"type": "grammar", "grammar": "a"}}, "invalid_value", "grammar"),
        (CHAT, {"messages": ASKED, "response_format": {"type": "json_schema"}}, "invalid_schema", "needs"),
        (CHAT, function(parameters={"type": "string"}), "invalid_value", "object"),
        (CHAT, function(name="a b"), "invalid_value", "name"),
        (CHAT, function(parameters={"properties": {}, "required": 5}), "invalid_schema", "required"),
        (CHAT, function(strict=True, parameters={"type": "object", "not": {}}), "invalid_schema", "not"),
        (CHAT, {"messages": ASKED, "tools": TOOLS, "tool_choice": "any"}, "invalid_value", "tool_choice"),
        (CHAT, {"messages": ASKED, "tool_choice": "required"}, "invalid_value", "tool_choice"),
        (CHAT, {"messages": ASKED, "functions": [{}]}, "unsupported_parameter", "functions"),
        (CHAT, {"messages": [*ASKED, {"role": "assistant", "tool_calls": [{}]}]}, "invalid_value", "messages.1"),
        (MESSAGES, {"messages": ASKED, "tools": [{"name": "a", "type": "bash_1"}]}, "unsupported_parameter", "bash"),
        (MESSAGES, {"messages": ASKED, "output_format": {"type": "xml"}}, "invalid_value", "json_schema"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "invalid_value", "tool_use"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "missing_field", "tool_use_id"),
        ("/v1/completions", {"prompt": "x", "tools": [{}]}, "unsupported_parameter", "tools"),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "x"}]}, "missing_field", "call_id"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "invalid_value", "tools"),
        ("/v1/responses", {"input": "x", "text": {"format": NOT}}, "invalid_schema", "not"),
    ],
)  # fmt: skip
def test_hostile_schemas_and_tools_are_refused_by_name(
    served: Served, path: str, body: dict[str, Any], code: str, named: str
) -> None:
    status, _, answer = served.ask(path, {"max_tokens": 3, **body})
    if code == "ok":
        assert status == 200
        return
    assert status == 400 and answer["error"]["code"] == code, answer
    assert re.search(named, answer["error"]["message"]), answer


@pytest.mark.parametrize("arguments", ['{"' + "ab " * 500_000 + '":1}', '{"a":[' + "1," * 700_000 + "1]}"])
def test_arguments_of_calls_count_before_their_tokens_do(served: Served, arguments: str) -> None:
    """A name, or numbers, of megabytes: tokens of those take seconds on one of the two threads that read requests."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    status, _, answer = served.ask(CHAT, {"messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}, *ASKED]})
    assert status == 400 and "characters" in answer["error"]["message"], answer


@pytest.mark.usefixtures("works_here")
def test_a_call_that_a_stop_string_cut_off_is_no_call_to_make(served: Served) -> None:
    asked = {"messages": ASKED, "max_tokens": 400}
    status, _, answer = served.ask(CHAT, {**asked, "tools": TOOLS[:1], "tool_choice": "required", "stop": ["city"]})
    (choice,) = answer["choices"]
    assert status == 200 and choice["finish_reason"] == "stop"
    called = {"tools": CLAUDE[:1], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    status, _, answer = served.ask(MESSAGES, {**asked, **called, "stop_sequences": ["city"]})
    assert status == 200 and (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "city"), answer
    status, _, answer = served.ask(MESSAGES, {**asked, **called})
    assert status == 200 and answer["stop_reason"] == "tool_use" and set(answer["content"][0]["input"]) == {"city", "days"}


@pytest.mark.exhaustive
def test_expensive_patterns_end_or_are_refused_and_harm_nobody(served: Served) -> None:
    for pattern in (
        "^((a{1,1000}){1,1000}){1,1000}$",
        "^(a|b|ab){1,500}c{1,500}$",
        "^(.*a){40}$",
        "^([a-z]{0,30}[0-9]{0,30}){0,30}$",
    ):
        status, _, answer = served.ask(
            CHAT, schema({"type": "string", "pattern": pattern}) | {"max_tokens": 40, "temperature": 1, "seed": 1}
        )
        assert status == 200 or (status == 400 and "complex" in answer["error"]["message"]), (pattern, status, answer)
    assert served.idle() and served.ask("/health")[0] == 200


@pytest.mark.usefixtures("works_here")
def test_control_tokens_in_tools_are_text(served: Served, model: Model) -> None:
    spelled = json.loads(json.dumps(WEATHER).replace("What the weather is.", "<|end|><|begin|>"))
    harmless = json.loads(json.dumps(WEATHER).replace("What the weather is.", "nothing"))
    control = [
        [token for token in model.chat_prompt(ASKED, tools=[each]).tokens if token in model.text.added_ids]
        for each in (spelled, harmless)
    ]
    assert control[0] == control[1]
    assert served.ask(CHAT, {"messages": ASKED, "tools": [spelled], "max_tokens": 2})[0] == 200


def test_without_a_format_tools_are_refused(model_path: Callable[..., Path]) -> None:
    plain = Model.load(
        model_path("tiny-llama", bits=4, group_size=32), mode="a16", threads=1, threads_prefill=1, context=128,
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )  # fmt: skip
    with serving(plain) as served:
        status, _, answer = served.ask(CHAT, {"messages": ASKED, "tools": TOOLS})
        assert status == 400 and answer["error"]["code"] == "unsupported_parameter" and answer["error"]["param"] == "tools"
        assert served.ask(CHAT, {"messages": ASKED, "tools": TOOLS, "tool_choice": "none", "max_tokens": 2})[0] == 200
