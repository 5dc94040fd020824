"""/v1/rerank: what is asked, as Jina's and Cohere's interfaces have it, and the answer."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from edgeq.errors import InputError
from edgeq.runtime.batching.job import Job, Update
from edgeq.runtime.model import Model
from edgeq.runtime.network.embedding import check_ranks, ranked
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Sampling
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.interfaces.chat_request import Asker, check_characters
from edgeq.runtime.server.interfaces.embeddings import MAX_INPUTS, MAX_TOKENS
from edgeq.runtime.server.interfaces.fields import LongText


class Document(Struct):
    """A document in an object, as Jina's interface takes them."""

    text: LongText


class Rerank(Struct, kw_only=True):
    """`top_n`: how many of the best are given;  `return_documents`: with their texts;  `instruction`: what a decoder ranks by,
    None: that of the file."""

    query: LongText
    documents: Annotated[list[LongText | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: Annotated[str, Meta(max_length=256)] | None = None
    top_n: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    return_documents: bool | None = None
    instruction: LongText | None = None


def refuse_rankings(model: Model) -> None:
    """ApiError: the model is no reranker."""
    try:
        check_ranks(model.file)
    except InputError as error:
        raise ApiError(404, "unsupported_endpoint", str(error)) from None


class Ranking:
    """What is left of a request once it has been read, and the scores as they come."""

    def __init__(self, model: Model, fields: Rerank, who: Asker) -> None:
        """ApiError: what is asked for cannot be had."""
        self._head, self._top_n = model.embedder.head, fields.top_n
        documents = [each if isinstance(each, str) else each.text for each in fields.documents]
        instruction = [] if fields.instruction is None else [("instruction", fields.instruction)]
        for name, text in (("query", fields.query), *instruction, *(("documents", each) for each in documents)):
            check_characters(model, len(text), name)
        try:
            prompts = model.embedder.pairs(fields.query, documents, fields.instruction)
        except InputError as error:
            empty = "query" if not fields.query else "documents" if "" in documents else "instruction"
            raise ApiError(400, "invalid_value", str(error).replace("`", ""), empty) from None
        self.jobs, self.tokens = list[Job](), sum(len(prompt.tokens) for prompt in prompts)
        for index, prompt in enumerate(prompts):
            if len(prompt.tokens) > model.context:
                message = (
                    f"This model's maximum context length is {model.context} tokens. However, the query and documents[{index}] "
                    f"have {len(prompt.tokens)} tokens together."
                )
                raise ApiError(400, "context_length_exceeded", message, "documents")
            self.jobs.append(Job(prompt, Request(), Sampling(), 1, who.client, who.owner))
        if self.tokens > MAX_TOKENS:
            raise ApiError(400, "invalid_value", f"the texts have more than {MAX_TOKENS} tokens together", "documents")
        self._scores = [0.0] * len(documents)
        self._documents = documents if fields.return_documents else None

    def take(self, first: int, update: Update) -> None:
        """The score of the document of that number."""
        assert update.vector is not None
        self._scores[first] = float(self._head.vector(update.vector)[0])

    def body(self, title: str) -> bytes:
        """The answer; `title`: how the model is called."""
        results = list[dict[str, Any]]()
        for index, score in ranked(self._scores, self._top_n):
            results.append({"index": index, "relevance_score": score})
            if self._documents is not None:
                results[-1]["document"] = {"text": self._documents[index]}
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        return msgspec.json.encode({"object": "list", "model": title, "results": results, "usage": usage})
