"""Calls of tools: formats, the grammar of each, and what is read of an answer however it is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edgeq.errors import InputError, UnsupportedError
from edgeq.runtime import Model, Sampling
from edgeq.runtime.answers.call_reader import CallReader, call_id, message_of
from edgeq.runtime.answers.tools import ToolUse, conversation, tool_use
from edgeq.runtime.request import Request
from edgeq.runtime.start import start
from edgeq.text.tool_formats import FORMATS, ToolFormat, tool_format

pytest.importorskip("llguidance")

from tests.runtime.answers.calling import ALL, TEMPLATE, WEATHER  # noqa: E402

pytestmark = pytest.mark.usefixtures("works_here")

ASKED = [{"role": "user", "content": "How is the weather?"}]
TOOLS = [WEATHER, ALL]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
BY_NAME = {form.name: form for form in FORMATS}


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a8", threads=1, threads_prefill=1, context=512, chat_template=TEMPLATE)


def written(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of this format writes them."""
    each = [f"{form.head}{name}{form.middle}{json.dumps(arguments)}{form.tail}" for name, arguments in calls]
    if form.separator is not None:
        each = [form.separator.join(each)]
    return (form.between or "").join(f"{form.begin}{form.opens}{call}{form.closes}{form.end}" for call in each)


@pytest.mark.parametrize("form", FORMATS, ids=BY_NAME)
def test_an_answer_is_read_alike_however_it_is_cut(model: Model, form: ToolFormat) -> None:
    wanted = [("get_weather", {"city": '}{"\\ [TOOL_CALLS] é', "days": 3}), ("get_weather_all", {"on": {"a": [True, "]}"]}})]
    wanted = wanted if form.between is not None or form.separator is not None else wanted[:1]
    text = ("Let me look. \n" if form.begin else "") + written(form, wanted)
    for seed in range(20):
        drawn, pieces, left = random.Random(seed), list[str](), text
        while left:
            count = drawn.choice([1, 1, 2, 5, 17, 1000]) if seed else 1
            pieces, left = [*pieces, left[:count]], left[count:]
        message = message_of(CallReader(form, model.text).read([(piece, -1) for piece in pieces]))
        assert message["content"] == ("Let me look." if form.begin else "")
        calls = message["tool_calls"]
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == wanted
        assert all(len(call["id"]) == form.id_length for call in calls)


@pytest.mark.parametrize("form", FORMATS, ids=BY_NAME)
@pytest.mark.parametrize(
    "text", ["", "Hello  \n", "a < b and [x] are <tool_cal", "<tool_call>\nnothing", " {", "[TOOL_CALLS] no"]
)
def test_text_that_is_no_call_is_text(model: Model, form: ToolFormat, text: str) -> None:
    message = message_of(CallReader(form, model.text).read([(character, -1) for character in text]))
    assert message == {"role": "assistant", "content": text}


def test_a_call_that_was_cut_off_has_its_beginning(model: Model) -> None:
    form = BY_NAME["hermes"]
    whole = written(form, [("get_weather", {"city": "Oslo", "days": 3})])
    message = message_of(CallReader(form, model.text).read([(whole[:60], -1)]))
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"city')


def answers(model: Model, use: ToolUse, seeds: range, **given: Any) -> Any:
    """Answers that are held to the tools, and why each ended."""
    request = Request(Sampling(temperature=1.0), 160, tools=use, **given).compiled(model.constraints.compile, model.text)
    for seed in seeds:
        drawn = replace(request, sampling=Sampling(temperature=1.0, seed=seed))
        generation = start(model, model.prompt("tool_call: "), drawn, None, None, 0.0)
        yield generation.message(), generation.finish_reason, generation.text()


def valid(message: dict[str, Any]) -> None:
    for call in message["tool_calls"]:
        jsonschema.validate(call["function"]["arguments"], SCHEMAS[call["function"]["name"]])


@pytest.mark.parametrize("form", FORMATS, ids=BY_NAME)
def test_required_calls_fit_their_schemas(model: Model, form: ToolFormat) -> None:
    use = tool_use(form, TOOLS, "required", False)
    assert use
    for message, reason, text in answers(model, use, range(1)):
        assert reason == "stop" and len(message["tool_calls"]) == 1 and message["content"] == "", text
        valid(message)
    named = tool_use(form, TOOLS, {"type": "function", "function": {"name": "get_weather_all"}})
    assert named
    for message, _, _ in answers(model, named, range(1)):
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather_all"]
        valid(message)


def fits(model: Model, use: ToolUse, text: str) -> bool:
    """Whether the grammar has an answer, to its end."""
    held = use.compiled(model.constraints.compile, model.text, None)
    matcher, tokens = held.begin(0, model.text.eos), [*model.text.encode_plain(text), min(model.text.eos)]
    return all(matcher.allowed(tokens[:i])[token] for i, token in enumerate(tokens))


@pytest.mark.parametrize("form", FORMATS, ids=BY_NAME)
def test_the_grammar_has_what_may_be_called(model: Model, form: ToolFormat) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Oslo", "days": 3}), ("get_weather_all", {"on": True})]
    auto, one = tool_use(form, TOOLS), tool_use(form, TOOLS, "auto", False)
    required, named = (
        tool_use(form, TOOLS, "required"),
        tool_use(form, TOOLS, {"type": "function", "function": {"name": "get_weather"}}),
    )
    assert auto and one and required and named
    for use in (auto, one, required, named):
        assert fits(model, use, written(form, calls[:1]))
        assert fits(model, use, "It rains.") == (use in (auto, one))
    assert fits(model, required, written(form, calls[1:])) and not fits(model, named, written(form, calls[1:]))
    assert not fits(model, auto, written(form, [("get_weather", {"city": "Rome", "days": 3})]))
    assert not fits(model, auto, written(form, [("get_snow", {})]))
    if form.begin:
        assert fits(model, auto, f"Let me look.\n{written(form, calls[:1])}")
    if form.separator is not None or form.between is not None:
        assert fits(model, auto, written(form, calls)) and not fits(model, one, written(form, calls))


def test_a_control_token_begins_a_call(model: Model) -> None:
    special = tool_use(replace(BY_NAME["hermes"], begin="<|begin|>", end="", opens="", closes=""), TOOLS, "auto", False)
    assert special and model.text.bos is not None
    # A bias makes one begin in free text.
    sampling = Sampling(temperature=1.0, seed=1, logit_bias={model.text.bos: 100.0})
    request = Request(sampling, 100, tools=special).compiled(model.constraints.compile, model.text)
    generation = start(model, model.prompt("x = "), request, None, None, 0.0)
    message = generation.message()
    assert model.text.bos in generation.tokens and generation.finish_reason == "stop"
    valid(message)


def test_an_answer_without_calls_can_be_held_to_a_schema(model: Model) -> None:
    held = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    auto = tool_use(BY_NAME["hermes"], TOOLS)
    assert auto
    for message, reason, text in answers(model, auto, range(2), response_format=held):
        assert reason == "length" or "tool_calls" in message or json.loads(text) in ("yes", "no")
    other = tool_use(BY_NAME["llama3"], TOOLS)
    assert other
    with pytest.raises(InputError, match="leave out `response_format`"):
        other.compiled(model.constraints.compile, model.text, held)


def test_keywords_that_are_not_supported_are_ignored_unless_strict(model: Model) -> None:
    odd = json.loads(json.dumps(WEATHER))
    odd["function"]["parameters"]["properties"]["city"] |= {"format": "a-city", "not": {"const": "x"}}
    use = tool_use(BY_NAME["hermes"], [odd], "required", False)
    assert use
    for message, _, _ in answers(model, use, range(1)):
        assert message["tool_calls"][0]["function"]["arguments"]["city"] in ("Oslo", "Lima")
    odd["function"]["strict"] = True
    use = tool_use(BY_NAME["hermes"], [odd], "required")
    assert use
    with pytest.raises(InputError, match="not|a-city"):
        use.compiled(model.constraints.compile, model.text, None)


def test_a_chat_calls_and_reads_the_result(model: Model) -> None:
    given: dict[str, Any] = {"tools": TOOLS, "max_tokens": 100}
    message = model.chat(ASKED, tool_choice="required", parallel_tool_calls=False, **given).message()
    valid(message)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21 degrees"}
    prompt = model.chat_prompt(conversation([*ASKED, message, result], None)[0])
    text = model.text.decode(prompt.tokens)
    assert "<tool_call>" in text and "tool: 21 degrees" in text and '"name": "get_weather' in text
    as_text = json.loads(json.dumps(message))
    for call in as_text["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert model.chat_prompt(conversation([*ASKED, as_text, result], None)[0]) == prompt
    shown = model.chat_prompt(*[conversation(ASKED, tool_use(BY_NAME["hermes"], TOOLS))[0]], tools=[WEATHER])
    assert "What the weather is." in model.text.decode(shown.tokens)
    assert "tool_calls" not in model.chat(ASKED, tools=TOOLS, tool_choice="none", max_tokens=3).message()


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        (TEMPLATE, (), "hermes"),
        ('{% if tools %}<tool_call>\\n{\\"name\\": <function-name>}</tool_call>{% endif %}', (), "hermes"),
        ("{% if tools %}<tool_call>\n<function=x></function></tool_call>{% endif %}", (), None),
        ('{% if tools %}\'{"name": function name, "parameters": dictionary of argument name and its value}.\'', (), "llama3"),
        ('{% if tools %}"[AVAILABLE_TOOLS]" "[TOOL_CALLS]"', (), "mistral"),
        ('{% if tools %}"[AVAILABLE_TOOLS]" "[TOOL_CALLS]" "[ARGS]"', (), "mistral-args"),
        ("{{ '<|tool|>' + message['tools'] }}", ("<|tool_call|>", "<|/tool_call|>"), "phi"),
        ("{{ '<|tool|>' + message['tools'] }}", (), None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ("<tool_call>",), None),
    ],
)
def test_the_format_is_found_in_the_template(template: str, tokens: tuple[str, ...], name: str | None) -> None:
    found = tool_format(template, tokens)
    assert (found.name if found else None) == name


def test_phi_has_its_tools_in_the_system_message() -> None:
    use = tool_use(BY_NAME["phi"], TOOLS)
    messages, variables = conversation(ASKED, use)
    assert variables == {} and json.loads(messages[0]["tools"])[0]["name"] == "get_weather" and messages[1:] == ASKED
    messages, _ = conversation([{"role": "system", "content": "Be brief."}, *ASKED], use)
    assert messages[0]["content"] == "Be brief." and "get_weather_all" in messages[0]["tools"]


@pytest.mark.parametrize(
    ("tools", "choice", "error"),
    [
        ("x", "auto", "at most 128"),
        ([WEATHER] * 129, "auto", "at most 128"),
        ([WEATHER, WEATHER], "auto", "the same name"),
        ([{"type": "function"}], "auto", r"tools\[0\]: expected"),
        ([{"type": "web_search"}], "auto", r"tools\[0\]: expected"),
        ([{"type": "function", "function": {"name": 'a"b'}}], "auto", "letters, digits"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], "auto", "of type object"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"x-guidance": {}}}}],
            "auto",
            r"tools\[0\]: .*x-guidance",
        ),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], "auto", "strict"),
        ([WEATHER], "any", "tool_choice is any"),
        ([WEATHER], {"type": "function", "function": {"name": "other"}}, "name of a tool"),
        ([], "required", "there are no tools"),
    ],
)
def test_tools_that_are_refused(tools: Any, choice: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        tool_use(BY_NAME["hermes"], tools, choice)


def test_calls_of_earlier_turns_are_checked(model: Model) -> None:
    for arguments in ("{", "[]", 5, "[" * 100_000):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        with pytest.raises(InputError, match=r"messages\[1\].tool_calls\[0\].function.arguments: not a JSON object"):
            model.chat([*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}])
    for levels in (65, 900):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":' * levels + "1" + "}" * levels}}
        with pytest.raises(InputError, match="nested more than 64 deep"):
            model.chat([*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}])
    with pytest.raises(InputError, match="a call has a function"):
        conversation([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], None)
    with pytest.raises(UnsupportedError, match="no format for calls"):
        tool_use(None, TOOLS)
    assert tool_use(None, TOOLS, "none") is None and tool_use(None, []) is None


def test_identifiers() -> None:
    short = {call_id(9, b"a", index) for index in range(50)} | {call_id(9, b"b", index) for index in range(50)}
    assert len(short) == 100 and all(len(found) == 9 and found.isalnum() for found in short)
    assert (
        call_id(29, b"a", 0).startswith("call_")
        and len(call_id(29, b"a", 0)) == 29
        and call_id(29, b"a", 0) == call_id(29, b"a", 0)
    )
