"""Texts become vectors, where the model was made for that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import FormatError, InputError
from edgeq.format.codec import as_float32
from edgeq.format.container import ModelFile
from edgeq.format.manifest import dense_shapes
from edgeq.network.pooling import EmbeddingPrompts, Pooling, RankingPrompt
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.arguments import callback, instance, integer, token_ids, wrong
from edgeq.runtime.network.pooler import EmbeddingRead, Pooler
from edgeq.runtime.sampling import NOT_FINITE
from edgeq.runtime.session.context_size import check_length
from edgeq.runtime.session.session import OnPrompt
from edgeq.text.tokenizer import Tokenizer

Texts = str | Sequence[str | Sequence[int]]
"""A text, or several, each as a string or as token ids."""
Vectors = NDArray[np.float32]
TINY = 1e-12
"""The least norm that a vector is divided by, as in torch."""


def check_pools(file: ModelFile) -> Pooling:
    """How the model of a file, which embeds texts or ranks documents, pools.  InputError: it continues texts."""
    pooling = file.metadata.config.pooling
    if pooling is None:
        raise InputError(
            f"{file.path}: this model continues texts; vectors of a model that was not trained for them are bad and look "
            "good: convert an embedding model, such as Qwen/Qwen3-Embedding-0.6B"
        )
    return pooling


def check_embeds(file: ModelFile) -> Pooling:
    """The same of a model that embeds texts.  InputError: it continues them, or ranks documents."""
    pooling = check_pools(file)
    if pooling.ranks:
        raise InputError(
            f"{file.path}: this model gives a score to each document for a query, and no vectors; use edgeq rerank, "
            "Model.rerank or /v1/rerank"
        )
    return pooling


def check_ranks(file: ModelFile) -> Pooling:
    """The same of a model that ranks documents.  InputError: it does not."""
    pooling = file.metadata.config.pooling
    if pooling is None or not pooling.ranks:
        does = "continues texts" if pooling is None else "makes vectors of texts, which edgeq embed gives"
        raise InputError(
            f"{file.path}: this model {does}; to rank documents convert a reranker, such as BAAI/bge-reranker-v2-m3"
        )
    return pooling


def check_continues(file: ModelFile, more: str = "") -> None:
    """InputError: the model of a file embeds texts; `more`: what can be done with it, for the end of the message."""
    pooling = file.metadata.config.pooling
    if file.metadata.config.policy is not None:
        raise InputError(f"{file.path}: this model makes actions and continues no texts; use edgeq act or Model.act{more}")
    if pooling is not None and pooling.ranks:
        raise InputError(
            f"{file.path}: this model ranks documents and has no head to continue texts with; use edgeq rerank, Model.rerank "
            f"or /v1/rerank{more}"
        )
    if pooling is not None:
        raise InputError(
            f"{file.path}: this model embeds texts ({pooling.kind} pooling) and has no head to continue them with; use edgeq "
            f"embed, Model.embed or /v1/embeddings{more}"
        )


def instruction_of(file: ModelFile, name: str | None) -> str:
    """The instruction that comes before a text; `name`: which of the file's, None: its default, or none.

    InputError: there is none of that name.
    """
    prompts = EmbeddingPrompts.of(file.metadata.generation)
    instance("prompt", name, (str, type(None)), "the name of a prompt of the file, or None")
    if name is not None and name not in prompts.texts:
        known = ", ".join(prompts.texts)[:400] or "none"
        raise InputError(f"{file.path} has no prompt {name[:80]!r}; it has {known}")
    chosen = prompts.default if name is None else name
    return prompts.texts[chosen] if chosen is not None else ""


def check_dimensions(dimensions: int | None, width: int) -> None:
    """InputError: a vector of `width` numbers cannot be cut to so many."""
    if dimensions is not None:
        integer("dimensions", dimensions, 1, width, f"an integer from 1 to {width}, as many as this model gives")


def finished(vector: Vectors, pooling: Pooling, dimensions: int | None) -> Vectors:
    """A pooled vector float32 [hidden], cut to its first `dimensions` (Kusupati et al. 2022), then normalized if the model
    does that."""
    cut = vector[:dimensions]
    if not pooling.normalize:
        return cut.copy()
    # Squares of large states overflow a float32.
    wide = cut.astype(np.float64)
    return np.asarray(wide / max(float(np.sqrt(wide @ wide)), TINY), np.float32)


def sigmoid(x: Vectors) -> Vectors:
    """1 / (1 + exp(-x)), whose exponential is never large."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small), np.float32)


def gelu(x: Vectors) -> Vectors:
    """x times the share of a standard normal distribution that is below it."""
    below = [0.5 * (1 + math.erf(float(v) / math.sqrt(2))) for v in x]
    return x * np.array(below, np.float32)


def layer_norm(x: Vectors, gain: Vectors, eps: float) -> Vectors:
    """LayerNorm of a vector, without a bias."""
    # Squares of large values overflow a float32.
    centered = x.astype(np.float64) - x.mean(dtype=np.float64)
    return np.asarray(centered / np.sqrt(np.square(centered).mean() + eps), np.float32) * gain


ACTIVATIONS: dict[str, Callable[[Vectors], Vectors]] = {
    "none": lambda x: x,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "gelu": gelu,
}
"""Those of dense layers."""


class DenseHead:
    """The layers that the pooled vector of a text goes through, of a file; without some it stays as it is."""

    def __init__(self, file: ModelFile) -> None:
        self._config = file.metadata.config
        self._pooling, arrays = check_pools(file), file.metadata.arrays
        refs = {name: arrays[name] for name in dense_shapes(self._config)}
        self._arrays = {name: as_float32(file.array(ref), ref.dtype) for name, ref in refs.items()}

    def vector(self, pooled: Vectors, dimensions: int | None = None) -> Vectors:
        """That of `finished`, from states float32 [hidden] that were pooled.

        FormatError: it is not finite, which sound weights do not give.
        """
        x = pooled
        for index, layer in enumerate(self._pooling.dense):
            # One vector at a time: what a product of several gives depends on how many they are.
            x = self._arrays[f"dense.{index}"] @ x
            x = x + self._arrays[f"dense.{index}_bias"] if layer.bias else x
            x = ACTIVATIONS[layer.activation](x)
            x = layer_norm(x, self._arrays[f"dense.{index}_norm"], self._config.rms_norm_eps) if layer.norm else x
        if not np.isfinite(x).all():
            raise FormatError(NOT_FINITE.replace("logits", "states"))
        return finished(x, self._pooling, dimensions)


class RankedDocument(NamedTuple):
    """A document of a ranking: which it is, from 0 on, and how well it answers the query; more is better."""

    document: int
    relevance_score: float


def ranked(scores: Sequence[float], top_n: int | None = None) -> list[RankedDocument]:
    """The best first, equals in their order."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [RankedDocument(i, scores[i]) for i in order[:top_n]]


class Embedder:
    """Errors are those of Model.embed.

    pooling   how the model pools;  width: numbers of a vector
    """

    def __init__(
        self, file: ModelFile, context: int, text: Callable[[], Tokenizer], pooler: Callable[[int | None], Pooler]
    ) -> None:
        """`text` reads the tokenizer of the file when it is first needed; `pooler` makes one with so many cache pages.

        InputError: the model continues texts.
        """
        self.pooling, self.pooler = check_pools(file), pooler
        self.width = self.pooling.vector_size(file.metadata.config.hidden_size)
        self._file, self._config, self._context, self._text = file, file.metadata.config, context, text

    def tokens(self, text: str | Sequence[int], instruction: str, name: str = "texts") -> list[int]:
        """Those of a text after an instruction, with what the tokenizer puts at its ends; tokens stay as they are.

        name   of the argument, for messages
        """
        if isinstance(text, (bytes, bytearray)):
            raise wrong(name, text, "strings or lists of token ids; decode them first")
        if isinstance(text, str):
            # The tokenizer gives an empty text its end token alone.
            tokens = self._text().encode(instruction + text) if text else []
        else:
            tokens = token_ids(name, text, self._config.vocab_size)
        if not tokens:
            raise InputError(f"`{name}` has an empty text; give at least one character")
        return tokens

    @cached_property
    def head(self) -> DenseHead:
        return DenseHead(self._file)

    def embed(self, texts: Texts, dimensions: int | None, prompt: str | None, on_progress: OnPrompt | None) -> Vectors:
        callback("on_progress", on_progress)
        check_embeds(self._file)
        check_dimensions(dimensions, self.width)
        given = [texts] if isinstance(texts, str) else texts
        if isinstance(given, (bytes, bytearray)) or not isinstance(given, Sequence):
            raise wrong("texts", texts, "a string, or a list of strings or lists of token ids")
        instruction = instruction_of(self._file, prompt)
        return self.read([Prompt(self.tokens(text, instruction)) for text in given], dimensions, on_progress)

    def pairs(self, query: str, documents: Sequence[str], instruction: str | None = None) -> list[Prompt]:
        """A query with each of the documents.

        InputError: not texts, or an empty one, or an instruction for a model that reads none.
        """
        for name, texts in (("query", [query]), ("documents", documents)):
            if isinstance(texts, (str, bytes, bytearray)) or not isinstance(texts, Sequence):
                raise wrong(name, texts, "a list of strings")
            for each in texts:
                if not isinstance(each, str):
                    raise wrong(name, each, "a string" if name == "query" else "strings")
                if not each:
                    raise InputError(f"`{name}` has an empty text; give at least one character")
        instance("instruction", instruction, (str, type(None)), "a string, or None")
        prompt, text = RankingPrompt.of(self._file.metadata.generation), self._text()
        if prompt is not None:
            before, after = text.encode_part(prompt.before), text.encode_part(prompt.after)
            filled = [prompt.filled(query, document, instruction) for document in documents]
            return [Prompt([*before, *text.encode_plain(each), *after]) for each in filled]
        if instruction is not None:
            raise InputError(f"{self._file.path}: this model reads no instruction; leave it out")
        encoded = text.encode_pairs([(query, document) for document in documents])
        return [Prompt(tokens, second=second) for tokens, second in encoded]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None,
        instruction: str | None,
        on_progress: OnPrompt | None,
    ) -> list[RankedDocument]:
        callback("on_progress", on_progress)
        check_ranks(self._file)
        if top_n is not None:
            integer("top_n", top_n, 1, 1 << 62, "how many of the best documents are given, or None")
        scores = self.read(self.pairs(query, documents, instruction), None, on_progress)[:, 0].tolist()
        return ranked(scores, top_n)

    def read(self, read: Sequence[Prompt], dimensions: int | None, on_progress: OnPrompt | None) -> Vectors:
        """The vectors of texts, each after it was through the dense layers."""
        for each in read:
            check_length(len(each.tokens), self._context)
        done, total = 0, sum(len(each.tokens) for each in read)
        vectors = np.zeros((len(read), dimensions or self.width), np.float32)
        pooler, waiting, indices = self.pooler(None), deque(enumerate(read)), dict[EmbeddingRead, int]()
        try:
            while waiting or pooler.readings:
                while waiting and (reading := pooler.seat(waiting[0][1])):
                    indices[reading] = waiting.popleft()[0]
                for reading in pooler.step():
                    vectors[indices.pop(reading)] = self.head.vector(reading.vector, dimensions)
                done += pooler.rows
                if on_progress is not None:
                    on_progress(done, total)
        finally:
            for reading in list(pooler.readings):
                pooler.drop(reading)
        return vectors
