"""/v1/embeddings: what clients of OpenAI's interface send and get, and what is refused."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import InputError
from edgeq.runtime import Model
from tests.checkpoints.embeddings import PROMPTS, embedding_checkpoint

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from edgeq.runtime.server.interfaces import embeddings  # noqa: E402
from tests.runtime.server.serving import Served, serving  # noqa: E402

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("embeds")
    source = embedding_checkpoint(checkpoint("qwen3"), folder / "source", "last", ends=True, prompts=PROMPTS)
    convert(str(source), folder / "embeds.edgeq", ConvertOptions(bits=8, group_size=32), lambda *_: None)
    with Model.load(folder / "embeds.edgeq", threads=1, threads_prefill=1) as found:
        yield found


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model, names=("tiny",), keys={}) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def vectors(answer: Any) -> NDArray[np.float32]:
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


def test_the_client_of_openai(client: Any, model: Model) -> None:
    texts = ["How tall is it?", "b", "a longer text " * 20]
    wanted = model.embed(texts)
    # Without a format it asks for base64 and unpacks that.
    for options in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model="tiny", input=texts, **options)  # type: ignore[call-overload]
        assert np.array_equal(np.array([each.embedding for each in found.data], np.float32), wanted)
        assert [each.index for each in found.data] == [0, 1, 2] and found.model == "tiny"
        tokens = sum(len(model.text.encode(text)) for text in texts)
        assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens)
    one = client.embeddings.create(model="tiny", input=texts[0], dimensions=16)
    assert np.array_equal(np.array(one.data[0].embedding, np.float32), model.embed(texts[0], dimensions=16)[0])
    asked = client.embeddings.create(model="tiny", input="b", extra_body={"prompt_name": "query"}, user="me")
    assert np.array_equal(np.array(asked.data[0].embedding, np.float32), model.embed("b", prompt="query")[0])


def test_token_ids(served: Served, model: Model) -> None:
    for given, tokens in (([5, 6, 7], [[5, 6, 7]]), ([[5, 6, 7], [9]], [[5, 6, 7], [9]])):
        status, _, found = served.ask(PATH, {"input": given})
        assert status == 200 and np.array_equal(vectors(found), model.embed(tokens))
        assert found["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_base64_is_little_endian_float32(served: Served, model: Model) -> None:
    _, _, found = served.ask("/embeddings", {"input": "a", "encoding_format": "base64"})
    packed = base64.b64decode(found["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(packed, "<f4"), model.embed("a")[0])


def test_many_texts_of_several_clients_at_once(served: Served, model: Model) -> None:
    texts = [f"text number {i} " * (1 + i % 7) for i in range(60)]
    wanted, found = model.embed(texts), dict[int, Any]()

    def ask(i: int) -> None:
        found[i] = served.ask(PATH, {"input": texts[i::4]})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        assert found[i][0] == 200 and np.array_equal(vectors(found[i][2]), wanted[i::4])
    assert served.idle()
    assert served.ask("/health")[2] == {"status": "ok"}
    assert 'edgeq_tokens_total{kind="prompt"}' in served.ask("/metrics")[2].decode()


REFUSED: dict[str, tuple[dict[str, Any], int, str, str | None, str]] = {
    "nothing": ({}, 400, "missing_field", "input", "input"),
    "no text": ({"input": []}, 400, "invalid_value", "input", "0 texts; expected 1 to 2048"),
    "an empty text": ({"input": ""}, 400, "invalid_value", "input", "none is empty"),
    "an empty one among others": ({"input": ["a", ""]}, 400, "invalid_value", "input", "none is empty"),
    "no tokens": ({"input": [[]]}, 400, "invalid_value", "input", "none is empty"),
    "both kinds": ({"input": ["a", [5]]}, 400, "invalid_value", "input", "input is a string, a list of strings"),
    "objects": ({"input": [{"text": "a"}]}, 400, "invalid_value", "input", "input is a string"),
    "a switch": ({"input": [True]}, 400, "invalid_value", "input", "input is a string"),
    "a switch among ids": ({"input": [5, True]}, 400, "invalid_value", "input", "holds True"),
    "a number": ({"input": 5}, 400, "invalid_value", "input", "Expected"),
    "too many": ({"input": ["a"] * 2049}, 400, "invalid_value", "input", "2049 texts"),
    "another vocabulary": ({"input": [100257]}, 400, "invalid_value", "input", "token 100257 is not in the vocabulary of 2048"),
    "too long": (
        {"input": ["a", "b c " * 600]},
        400,
        "context_length_exceeded",
        "input",
        "maximum context length is 512 tokens",
    ),
    "far too long": ({"input": "a" * (1 << 20)}, 400, "context_length_exceeded", "input", "have 1048576 characters"),
    "too many ids": ({"input": [5] * 600}, 400, "context_length_exceeded", "input", "input[0] has 600"),
    "no dimension": ({"input": "a", "dimensions": 0}, 400, "invalid_value", "dimensions", ">= 1"),
    "more than there are": ({"input": "a", "dimensions": 129}, 400, "invalid_value", "dimensions", "from 1 to 128"),
    "another format": ({"input": "a", "encoding_format": "hex"}, 400, "invalid_value", "encoding_format", "hex"),
    "another instruction": ({"input": "a", "prompt_name": "q"}, 400, "invalid_value", "prompt_name", "it has document, query"),
    "another model": ({"input": "a", "model": "gpt-4"}, 404, "model_not_found", "model", "there is tiny"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_embedded_is_refused(case: str, served: Served) -> None:
    body, status, code, param, words = REFUSED[case]
    found, _, answer = served.ask(PATH, body)
    error = answer["error"]
    assert (found, error["code"], error["param"]) == (status, code, param) and words in error["message"], error
    assert "/" not in error["message"] or "/v1" in error["message"]


def test_a_request_of_too_many_tokens(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_TOKENS", 100)
    assert served.ask(PATH, {"input": [[5] * 50] * 2})[0] == 200
    status, _, found = served.ask(PATH, {"input": [[5] * 50] * 3})
    assert status == 400 and "more than 100 tokens together" in found["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_texts_do_not_go_on_here(path: str, body: Any, served: Served) -> None:
    status, _, found = served.ask(path, body)
    assert (status, found["error"]["code"]) == (404, "unsupported_endpoint")
    assert "embeds texts (last pooling)" in found["error"]["message"] and "/v1/embeddings" in found["error"]["message"]


def test_the_page_to_chat_is_not_there(served: Served) -> None:
    assert served.ask("/")[0] == 404


def test_a_client_that_leaves_has_nothing_read(served: Served, model: Model) -> None:
    body = json.dumps({"input": [[5] * 500] * 200}).encode()
    with served.connect() as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not served.server.scheduler.busy:
            pass
    assert served.idle()
    assert served.server.scheduler.pages[1] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapters": {"a": None}}, "--lora goes with models that continue texts"),
        ({"prompt_cache": Path("/nowhere")}, "--prompt-cache goes with models that continue texts"),
        ({"draft": "auto"}, "embeds texts"),
    ],
)
def test_settings_of_other_models_are_refused(settings: dict[str, Any], message: str, model: Model) -> None:
    with pytest.raises(InputError, match=message), serving(model, **settings):
        pass
