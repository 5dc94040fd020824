"""What models do that read texts and do not continue them: make vectors of them, rank documents, and act."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.runtime.arguments import wrong
from edgeq.runtime.network.embedding import Embedder, RankedDocument, Texts, Vectors
from edgeq.runtime.network.pictures import ImageSource, Pictures
from edgeq.runtime.network.policy import Policy, check_acts, checked_steps, prompt_of, state_of
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
    policy: Policy | None
    pictures: Pictures | None

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
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        on_progress: OnPrompt | None = None,
    ) -> list[RankedDocument]:
        """The documents, the one that answers the query best first: (index, relevance_score) of each.

        top_n       keep so many, the best; None: all
        instruction  what the documents are ranked by, of a decoder that ranks; None: that of the file
        on_progress  called after each run with (tokens done, total tokens)

        A score is as the model was trained to give it, most from 0 to 1.  It does not depend on the other documents.
        InputError: the model is no reranker or reads no instruction, a text is empty, or a query and a document together are
        longer than the context.
        """
        return self.embedder.rerank(query, documents, top_n, instruction, on_progress)

    def act(
        self,
        images: Sequence[ImageSource],
        text: str,
        state: Sequence[float] | NDArray[np.float32],
        *,
        noise: NDArray[np.float32] | None = None,
        seed: int | None = None,
        steps: int | None = None,
    ) -> NDArray[np.float32]:
        """What a robot does next, float32 [actions, numbers of an action]: in its own units, where the file has the statistics
        of the data that the policy was trained with, else in the units of training.

        images   what its cameras see, in the order of training: paths, bytes of files, PIL images
        text     what it is to do
        state    of the robot, in the same units; without statistics a shorter one goes on with zeros
        noise    float32 [actions, action_size] of the policy, from which it makes them; None: drawn by `seed`; None: by chance
        steps    from noise to actions; None: those of the file

        InputError: the model is no policy, is closed, or an argument of the wrong type or out of range.
        """
        expert = check_acts(self.config)
        policy, pictures = self.policy, self.pictures
        if policy is None or pictures is None:
            raise InputError("the model is closed; load it again")
        steps, shape = checked_steps(steps, expert), (expert.actions, expert.action_size)
        given = state_of(state, expert)
        if noise is None:
            noise = np.random.default_rng(seed).standard_normal(shape, np.float32)
        elif not isinstance(noise, np.ndarray) or noise.shape != shape:
            raise wrong("noise", noise, f"an array of {shape[0]} x {shape[1]} numbers")
        prompt = prompt_of(text, images, pictures, self.text)
        with self.session() as session:
            return expert.own_actions(policy.act(session, prompt, given, noise.astype(np.float32), steps))
