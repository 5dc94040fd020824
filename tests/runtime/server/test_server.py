"""The server with clients as they are installed: answers are those of the Python interface."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import FormatError, InputError
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import PicturePlace, Prompt
from edgeq.runtime import Model, Sampling
from edgeq.runtime.batching.job import Busy, Job, Ticket, Update
from edgeq.runtime.request import Request

pytest.importorskip("prometheus_client")

from edgeq.runtime.server.serve import bound  # noqa: E402
from edgeq.runtime.server.settings import Settings  # noqa: E402
from tests.runtime.server.serving import TEMPLATE, Served, serving  # noqa: E402

pytestmark = pytest.mark.usefixtures("works_here")

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def read_file(path):"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a16", threads=1, threads_prefill=1, context=512, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model, names=("tiny", "other")) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def expected(model: Model, **options: Any) -> Any:
    generation = model.chat(ASKED, **{"max_tokens": 12, "sampling": Sampling(), **options})
    generation.text()
    return generation


def test_a_chat_is_that_of_the_python_interface(model: Model, client: Any) -> None:
    answer = client.chat.completions.create(model="other", messages=ASKED, logprobs=True, top_logprobs=2, **GREEDY)
    alone = expected(model, logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == alone.text() and choice.finish_reason == "length"
    assert (answer.model, answer.object, answer.id[:9]) == ("tiny", "chat.completion", "chatcmpl-")
    assert answer.usage.completion_tokens == 12 and answer.usage.prompt_tokens == alone.measurement.prompt_tokens
    assert [entry.logprob for entry in choice.logprobs.content] == [each.logprob for each in alone.logprobs]
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == alone.text()
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_a_stream_has_the_same_text_and_ends_as_clients_expect(served: Served, model: Model, client: Any) -> None:
    chunks = list(client.chat.completions.create(
        model="tiny", messages=ASKED, stream=True, stream_options={"include_usage": True}, logprobs=True, **GREEDY
    ))  # fmt: skip
    *parts, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == expected(model).text()
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in parts if chunk.choices[0].logprobs) == 12
    assert last.choices == [] and last.usage.completion_tokens == 12 and all(chunk.usage is None for chunk in parts)
    status, headers, body = served.ask("/v1/chat/completions", {"messages": ASKED, "stream": True, **GREEDY})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = body.decode().replace("\r\n", "\n").split("data: ")
    assert "[DONE]" in events[-1] and '"usage"' not in body.decode() and "\nid:" not in body.decode()


def test_a_seed_gives_the_same_texts_whatever_runs_beside(client: Any) -> None:
    def ask() -> list[str]:
        answer = client.chat.completions.create(model="tiny", messages=ASKED, seed=-5, temperature=1.2, n=3, max_tokens=16)
        return [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    alone, together = ask(), list[list[str]]()
    threads = [threading.Thread(target=lambda: together.append(ask())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [alone] * 3 and len(set(alone)) == 3


def test_completions_take_text_and_tokens_and_several_of_each(model: Model, client: Any) -> None:
    texts = ["import ", "class Point:"]
    alone = [model.generate(text, max_tokens=6, sampling=Sampling()).text() for text in texts]
    tokens = [model.text.encode(text) for text in texts]
    for prompt in (texts, tokens):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=6, logprobs=1)
        assert [choice.text for choice in answer.choices] == alone
        assert answer.choices[1].logprobs.text_offset[0] == 0 and len(answer.choices[1].logprobs.tokens) == 6
    one = client.completions.create(model="tiny", prompt=tokens[0], temperature=0, max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in one) == alone[0]


def test_stop_strings_biases_and_penalties_hold(model: Model, client: Any) -> None:
    whole = expected(model, max_tokens=40).text()
    stop = whole[len(whole) // 2 :][:4]
    answer = client.chat.completions.create(model="tiny", messages=ASKED, temperature=0, max_tokens=40, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)] and answer.choices[0].finish_reason == "stop"
    token = model.text.encode("z")[-1]
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=4, logit_bias={str(token): 100}, temperature=0)
    assert answer.choices[0].text == model.text.decode([token] * 4)


def test_what_was_read_before_is_not_read_again(served: Served, client: Any) -> None:
    long = [{"role": "user", "content": "".join(f"line {i} of a file\n" for i in range(40))}]
    first, second = (client.chat.completions.create(model="tiny", messages=long, **GREEDY) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > second.usage.prompt_tokens - 65


def test_messages_of_anthropic(served: Served, model: Model) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "system": "Be brief.", "extra_body": {"temperature": 0}}
    given["messages"] = [{"role": "user", "content": [{"type": "text", "text": ASKED[1]["content"]}]}]
    answer, alone = client.messages.create(**given), expected(model)
    assert answer.content[0].text == alone.text() and answer.stop_reason == "max_tokens"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == alone.measurement.prompt_tokens
    with client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == alone.text()
        assert stream.get_final_message().usage.output_tokens == 12
    stop = alone.text()[4:7]
    stopped = client.messages.create(**given, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    counted = client.messages.count_tokens(model="tiny", messages=given["messages"], system="Be brief.")
    assert counted.input_tokens == alone.measurement.prompt_tokens
    with pytest.raises(anthropic.BadRequestError, match="a block is text or image"):
        client.messages.create(
            **{**given, "messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "x"}}]}]}
        )


def test_responses_of_openai(model: Model, client: Any) -> None:
    given = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0}
    content = [{"type": "input_text", "text": ASKED[1]["content"]}]
    alone = expected(model)
    for asked in (ASKED[1]["content"], [{"role": "user", "content": content}]):
        answer = client.responses.create(input=asked, **given)
        assert answer.output_text == alone.text() and answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens" and answer.output[0].content[0].logprobs == []
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (alone.measurement.prompt_tokens, 12)
    include: Any = ["message.output_text.logprobs"]
    with client.responses.stream(input=ASKED[1]["content"], include=include, top_logprobs=2, **given) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == alone.text()
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    (part,) = events[-1].response.output[0].content
    assert part.text == alone.text() and len(part.logprobs) == 12 and len(part.logprobs[0].top_logprobs) == 2
    stops = client.responses.create(input=[*ASKED, {"type": "reasoning", "id": "x", "summary": []}], **given)
    assert stops.output_text == model.chat([ASKED[0], *ASKED], max_tokens=12, sampling=Sampling()).text()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
        ({"background": True}, "background", "keeps no answers"),
        ({"input": []}, "input", "Expected"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "not 'item_reference'"),
        ({"input": [{"role": "user"}]}, "input[0]", "role and content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "not 'input_file'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y"}]}]},
            "input[0].content[0]",
            "nothing is fetched",
        ),
        ({"input": "x", "temperature": 3}, "temperature", "<= 2"),
        ({"input": "line of text\n" * 400}, "input", "maximum context length"),
    ],
)
def test_a_response_that_cannot_be_had_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    status, _, body = served.ask("/v1/responses", {"input": "x", "instructions": "Be brief.", "max_output_tokens": 2} | fields)
    assert (status, body["error"]["param"]) == (400, param) and message in body["error"]["message"]


def test_models_health_and_metrics(served: Served, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("tiny").context_length == 512
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError, match="there is tiny, other"):
        client.chat.completions.create(model="/etc/passwd", messages=ASKED)
    assert served.ask("/health")[::2] == (200, {"status": "ok"})
    text = served.ask("/metrics")[2].decode()
    assert 'edgeq_requests_total{endpoint="/v1/chat/completions",status="200"}' in text
    assert 'edgeq_tokens_total{kind="generated"}' in text and "edgeq_step_seconds_count" in text and "/etc" not in text
    assert served.ask("/api/chat", {})[2]["error"]["code"] == "unsupported_endpoint"
    with pytest.raises(openai.NotFoundError, match="trained for them"):
        client.embeddings.create(model="tiny", input="a text")


def test_the_page_needs_nothing_from_elsewhere(served: Served) -> None:
    status, headers, page = served.ask("/")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"<textarea" in page
    assert "default-src 'none'" in headers["content-security-policy"] and b"http" not in page
    # Of a field for a key outside of a form Chromium says so on its console.
    assert b'<input id="key" type="password" form="form"' in page and b'<form id="form">' in page


def test_a_client_that_leaves_stops_the_work(served: Served) -> None:
    """Both of a stream, and of an answer that it waits for."""
    cancelled = served.server.metrics.cancelled._value.get()
    for stream in (True, False):
        body = json.dumps({"prompt": "import ", "max_tokens": 500, "ignore_eos": True, "n": 4, "stream": stream}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with served.connect() as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            while not served.server.scheduler.running:
                time.sleep(0.001)
        assert served.idle()
    assert served.server.metrics.cancelled._value.get() == cancelled + 2


def test_too_many_are_told_to_come_again(model: Model) -> None:
    with serving(model, seats=1, queue=1) as served:
        body = {"prompt": "import ", "max_tokens": 300, "ignore_eos": True}
        found: list[tuple[int, dict[str, str], Any]] = []
        threads = [threading.Thread(target=lambda: found.append(served.ask("/v1/completions", body))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = sorted(status for status, _, _ in found)
        assert statuses[0] == 200 and statuses[-1] == 503 and set(statuses) == {200, 503}
        refused = next(answer for answer in found if answer[0] == 503)
        assert refused[2]["error"]["code"] == "server_overloaded" and 1 <= int(refused[1]["retry-after"]) <= 120


def test_sixteen_clients_have_turns_at_four_seats(model: Model) -> None:
    with serving(model, seats=4, queue=32) as served:
        answered: list[None] = []

        def ask() -> None:
            for _ in range(2):
                assert served.ask("/v1/completions", {"prompt": "import ", "max_tokens": 16, "ignore_eos": True})[0] == 200
            answered.append(None)

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answered) == 16 and served.idle()


def test_a_stream_tells_no_path(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    error = FormatError(f"{model.file.path}: layer 3 is damaged")
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        with serving(model) as served:

            def step(served: Served = served) -> list[Update]:
                return [Update(ticket, 0, error=error) for ticket in list(served.server.owner._answering)]

            monkeypatch.setattr(served.server.scheduler, "step", step)
            body = {"messages": ASKED[1:], "input": "x", "stream": True, "max_tokens": 4}
            answer = served.ask(path, body)[2].decode()
            assert "layer 3 is damaged" in answer and str(model.file.path.parent) not in answer and "[DONE]" not in answer


def test_pictures_that_wait_are_capped(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request alone may have more than all together."""
    monkeypatch.setattr("edgeq.runtime.server.owner.MAX_PICTURE_BYTES", 1000)
    picture = Picture(np.zeros((4, 3, 10, 10), np.uint8), (1, 2, 2), b"d" * 16)
    prompt = Prompt([5, 6], (picture,), (PicturePlace(0, (1, 1, 1), picture.digest, 1),))
    with serving(model) as served:
        monkeypatch.setattr(served.server.scheduler, "submit", Ticket)
        owner, given = served.server.owner, Job(prompt, Request(), Sampling())
        first = owner.submit([given])
        with pytest.raises(Busy, match="pictures of other requests"):
            owner.submit([given])
        owner.submit([Job(Prompt([5, 6]), Request(), Sampling())])
        owner._answering.pop(first.tickets[0])
        owner.submit([given])
        owner._answering.clear()


def test_a_penalty_under_two_names_is_refused(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 2, "repetition_penalty": 1.1, "repeat_penalty": 1.2}
    status, _, answer = served.ask("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "repeat_penalty")


def test_what_begins_late_knows_early_that_its_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(InputError, match="in use by another program"):
        bound(Settings(port=other.getsockname()[1]))
    (free,) = bound(Settings(port=0))
    free.close()


def test_a_failed_program_tells_its_clients_and_ends_the_process(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with serving(model, on_failure=ended.set) as served:
        monkeypatch.setattr(served.server.scheduler, "step", lambda: 1 / 0)
        status, headers, body = served.ask("/v1/completions", {"prompt": "import "})
        assert status == 500 and body["error"]["code"] == "server_error" and headers["x-should-retry"] == "false"
        assert served.ask("/health")[::2] == (503, {"status": "failed"}) and ended.wait(120)
