"""/v1/rerank: what clients of Jina's and Cohere's interfaces send and get, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.runtime import Model
from tests.checkpoints.encoders import bert_reranker

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from tests.runtime.server.serving import Served, serving  # noqa: E402

PATH = "/v1/rerank"
QUERY = "What is the capital of France?"
DOCUMENTS = ["Bananas are yellow.", "Paris is the capital.", "London"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("ranks")
    options = ConvertOptions(bits=8, group_size=32)
    convert(str(bert_reranker(folder / "source")), folder / "ranks.edgeq", options, lambda *_: None)
    with Model.load(folder / "ranks.edgeq", threads=1, threads_prefill=1) as found:
        yield found


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model, names=("tiny",), keys={}) as found:
        yield found


def test_the_best_first(served: Served, model: Model) -> None:
    wanted = [{"index": i, "relevance_score": score} for i, score in model.rerank(QUERY, DOCUMENTS)]
    tokens = sum(len(each.tokens) for each in model.embedder.pairs(QUERY, DOCUMENTS))
    for path in (PATH, "/rerank"):
        status, _, found = served.ask(path, {"model": "tiny", "query": QUERY, "documents": DOCUMENTS})
        assert status == 200 and found["results"] == wanted and (found["object"], found["model"]) == ("list", "tiny")
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    asked = {"query": QUERY, "documents": [{"text": each} for each in DOCUMENTS], "top_n": 2, "return_documents": True}
    _, _, found = served.ask(PATH, asked)
    assert found["results"] == [{**each, "document": {"text": DOCUMENTS[each["index"]]}} for each in wanted[:2]]
    assert served.idle()


REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no query": ({"documents": ["a"]}, "missing_field", "query", "query"),
    "an empty query": ({"query": "", "documents": ["a"]}, "invalid_value", "query", "empty text"),
    "no documents": ({"query": "a"}, "missing_field", "documents", "documents"),
    "none of them": ({"query": "a", "documents": []}, "invalid_value", "documents", "length"),
    "an empty one": ({"query": "a", "documents": ["b", ""]}, "invalid_value", "documents", "empty text"),
    "a number": ({"query": "a", "documents": [5]}, "invalid_value", "documents", "Expected"),
    "an object without text": ({"query": "a", "documents": [{"url": "b"}]}, "missing_field", "documents", "text"),
    "too many": ({"query": "a", "documents": ["b"] * 2049}, "invalid_value", "documents", "2048"),
    "an instruction": (
        {"query": "a", "documents": ["b"], "instruction": "find"},
        "invalid_value",
        "instruction",
        "reads no instruction",
    ),
    "none of the best": ({"query": "a", "documents": ["b"], "top_n": 0}, "invalid_value", "top_n", ">= 1"),
    "too long": (
        {"query": "a", "documents": ["b", "c " * 200]},
        "context_length_exceeded",
        "documents",
        "the query and documents[1] have",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_ranked_is_refused(case: str, served: Served) -> None:
    body, code, param, words = REFUSED[case]
    status, _, found = served.ask(PATH, body)
    error = found["error"]
    assert (status, error["code"]) == (400, code) and (error["param"] or "").startswith(param), error
    assert words in error["message"], error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_other_interfaces_say_what_the_model_is_for(path: str, body: Any, served: Served) -> None:
    status, _, found = served.ask(path, body)
    assert (status, found["error"]["code"]) == (404, "unsupported_endpoint") and "/v1/rerank" in found["error"]["message"]
