"""/v1/embeddings: what is asked, and the answer."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from edgeq.errors import InputError
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.batching.embedding_scheduler import EmbeddingScheduler
from edgeq.runtime.batching.job import Job, Update
from edgeq.runtime.model import Model
from edgeq.runtime.network.embedding import check_continues, check_dimensions, check_embeds, instruction_of
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Sampling
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.interfaces.chat_request import Asker, check_characters
from edgeq.runtime.server.interfaces.fields import LongText
from edgeq.runtime.server.settings import Settings

MAX_INPUTS = 2048
"""Texts of a request, as in OpenAI's interface."""
MAX_TOKENS = 1 << 19
"""Tokens of all texts of a request."""


class Embeddings(Struct, kw_only=True):
    """`prompt_name`: an instruction of the file that comes before each string."""

    input: LongText | list[Any]
    model: Annotated[str, Meta(max_length=256)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None


def scheduler_of(model: Model, settings: Settings, cache_pages: int | None) -> EmbeddingScheduler:
    """That of a server.  InputError: settings for models that continue texts."""
    for given, option in ((settings.adapters, "--lora"), (settings.prompt_cache, "--prompt-cache")):
        if given:
            raise InputError(f"{option} goes with models that continue texts; {model.file.path} embeds them: leave it out")
    if settings.draft != "off":
        check_continues(model.file)
    return EmbeddingScheduler(model, queue=2 * MAX_TOKENS, pages=cache_pages)


def refuse_texts(model: Model) -> None:
    """ApiError: the model continues texts."""
    try:
        check_embeds(model.file)
    except InputError as error:
        raise ApiError(404, "unsupported_endpoint", str(error)) from None


def refuse_vectors(model: Model) -> None:
    """ApiError: the model embeds texts."""
    try:
        check_continues(model.file)
    except InputError as error:
        raise ApiError(404, "unsupported_endpoint", str(error)) from None


class Embedding:
    """What is left of a request once it has been read, and the vectors as they come."""

    def __init__(self, model: Model, fields: Embeddings, who: Asker) -> None:
        """InputError, ApiError: what is asked for cannot be had."""
        embedder, self._dimensions = model.embedder, fields.dimensions
        self._head, self._packed = embedder.head, fields.encoding_format == "base64"
        try:
            check_dimensions(fields.dimensions, embedder.width)
        except InputError as error:
            raise ApiError(400, "invalid_value", str(error).replace("`", ""), "dimensions") from None
        try:
            instruction = instruction_of(model.file, fields.prompt_name)
        except InputError as error:
            raise ApiError(400, "invalid_value", str(error), "prompt_name") from None
        self.jobs, self.tokens = list[Job](), 0
        for index, text in enumerate(_several(fields.input)):
            at = f"input[{index}]" if isinstance(fields.input, list) else "input"
            if isinstance(text, str):
                check_characters(model, len(text), "input")
            try:
                tokens = embedder.tokens(text, instruction, "input")
            except InputError as error:
                raise ApiError(400, "invalid_value", str(error).replace("`", ""), "input") from None
            if len(tokens) > model.context:
                message = (
                    f"This model's maximum context length is {model.context} tokens. However, {at} has {len(tokens)} tokens."
                )
                raise ApiError(400, "context_length_exceeded", message, "input")
            self.jobs.append(Job(Prompt(tokens), Request(), Sampling(), 1, who.client, who.owner))
            self.tokens += len(tokens)
            if self.tokens > MAX_TOKENS:
                raise ApiError(400, "invalid_value", f"the texts have more than {MAX_TOKENS} tokens together", "input")
        self._vectors: list[Any] = [None] * len(self.jobs)

    def take(self, first: int, update: Update) -> None:
        """The vector of the text of that number."""
        assert update.vector is not None
        found = self._head.vector(update.vector, self._dimensions)
        self._vectors[first] = base64.b64encode(found.astype("<f4").tobytes()).decode() if self._packed else found

    def body(self, title: str) -> bytes:
        """The answer; `title`: how the model is called.  Of many vectors it takes a second."""
        data = [
            {"object": "embedding", "index": index, "embedding": each if self._packed else each.tolist()}
            for index, each in enumerate(self._vectors)
        ]
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": title, "usage": usage})


def _several(given: str | list[Any]) -> list[Any]:
    """The texts, each a string or token ids.  ApiError: none, too many, or of several kinds."""
    several = [given] if isinstance(given, str) or (given and type(given[0]) is int) else given
    if not 0 < len(several) <= MAX_INPUTS:
        raise ApiError(400, "invalid_value", f"input has {len(several)} texts; expected 1 to {MAX_INPUTS}", "input")
    kind = type(several[0])
    if kind not in (str, list) or any(type(each) is not kind or not each for each in several):
        message = "input is a string, a list of strings, a list of token ids or a list of those, and none is empty"
        raise ApiError(400, "invalid_value", message, "input")
    return several
