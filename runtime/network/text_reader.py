"""What models do that read texts and do not continue them: make vectors of them, and rank documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.runtime.network.embedding import Embedder, RankedDocument, Texts, Vectors
from edgeq.runtime.network.pooler import Pooler
from edgeq.runtime.session.prefill_rate import PrefillRate
from edgeq.runtime.session.session import OnPrompt, Session
from edgeq.targets.target import Program
from edgeq.text.tokenizer import Tokenizer


class TextReader(Protocol):
    """A part of Model."""

    file: ModelFile
    config: ModelConfig
    context: int
    prefill_rate: PrefillRate

    @property
    def program(self) -> Program: ...

    @property
    def text(self) -> Tokenizer: ...

    def session(self) -> Session: ...

    @cached_property
    def embedder(self) -> Embedder:
        """What reads texts for `embed`.  InputError: the model continues texts."""
        parts = self.session, self.config, self.program.options, self.prefill_rate
        return Embedder(self.file, self.context, lambda: self.text, lambda pages: Pooler(*parts, pages))

    def embed(
        self, texts: Texts, *, dimensions: int | None = None, prompt: str | None = None, on_progress: OnPrompt | None = None
    ) -> Vectors:
        """The vectors of texts, each a string or token ids, float32 [texts, dimensions]; several are read in each run.

        dimensions  keep so many, the first, of each vector (Matryoshka); None: all
        prompt      the name of the file's instruction that comes before each string; None: its default, mostly none
        on_progress  called after each run with (tokens done, total tokens)

        They have a length of 1 where the model normalizes them, cut ones too.  Tokens get no instruction and no end token.
        InputError: the model continues texts, a text is empty or longer than the context, or an argument of the wrong type.
        """
        return self.embedder.embed(texts, dimensions, prompt, on_progress)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, on_progress: OnPrompt | None = None
    ) -> list[RankedDocument]:
        """The documents, the one that answers the query best first: (index, relevance_score) of each.

        top_n       keep so many, the best; None: all
        on_progress  called after each run with (tokens done, total tokens)

        A score is as the model was trained to give it, most from 0 to 1.  It does not depend on the other documents.
        InputError: the model is no reranker, a text is empty, or a query and a document together are longer than the context.
        """
        return self.embedder.rerank(query, documents, top_n, on_progress)
