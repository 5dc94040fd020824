"""What is asked of one text, checked at the call."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeq.errors import InputError
from edgeq.runtime.answers.call_reader import CallReader
from edgeq.runtime.answers.constraint import Compile, Constraint, Matcher
from edgeq.runtime.answers.repetition import Breakers
from edgeq.runtime.answers.response_format import ResponseFormat
from edgeq.runtime.answers.stopping import Ending
from edgeq.runtime.answers.thinking import AfterThinking, Thinking
from edgeq.runtime.answers.tokenizer import MAX_STOP_LENGTH, MAX_STOPS
from edgeq.runtime.answers.tools import ToolUse, constraint_of
from edgeq.runtime.arguments import flag, instance, integer, texts, token_ids, wrong
from edgeq.runtime.sampling import Processor, Rules, Sampler, Sampling
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.text.tokenizer import Tokenizer

MAX_TOKENS = 1 << 31
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
"""Tokens whose probabilities are given beside that of the drawn one; as many as OpenAI's interface gives."""


@dataclass(frozen=True)
class Request:
    """The arguments of Model.generate that say what text is wanted, as they are explained there.

    tools        which may be called;  constraint: what the text is held to, once it is compiled
    thinking     how the text begins, which no constraint is about; None: it is all answer

    `check` raises InputError for one of the wrong type or out of range; draft and gamma are checked by Model.speculator.
    """

    sampling: Sampling | None = None
    max_tokens: int = 256
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    processors: Sequence[Processor] = ()
    draft: DraftSource = "off"
    gamma: int | None = None
    response_format: ResponseFormat | None = None
    tools: ToolUse | None = None
    constraint: Constraint | None = None
    thinking: Thinking | None = None

    def compiled(self, compile: Compile, text: Tokenizer) -> Request:
        """The same, with what the text is held to.  It may take seconds: not for the thread that runs the model.

        InputError: a schema or a grammar that cannot be used.  UnsupportedError: llguidance is not installed.
        """
        return replace(self, constraint=constraint_of(self.response_format, compile, text, self.tools))

    @property
    def waits(self) -> bool:
        """Whether it has to be compiled before a text begins."""
        return self.constraint is None and (self.response_format is not None or self.tools is not None)

    def reader(self, text: Tokenizer, prompt: Sequence[int], sampling: Sampling, sample: int = 0) -> CallReader | None:
        """For the answer to a prompt of these tokens; None: it calls no tools."""
        if self.tools is None:
            return None
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        return CallReader(self.tools.form, text, f"{seed} {sample} {list(prompt)}".encode())

    def check(self, vocab_size: int) -> None:
        check_sampling(self.sampling, vocab_size)
        integer("max_tokens", self.max_tokens, 1, MAX_TOKENS, "an integer of at least 1")
        texts("stop", self.stop, MAX_STOPS, MAX_STOP_LENGTH)
        if len(token_ids("stop_tokens", self.stop_tokens, vocab_size)) > MAX_STOP_TOKENS:
            raise wrong("stop_tokens", f"{len(self.stop_tokens)} tokens", f"at most {MAX_STOP_TOKENS}")
        integer("min_tokens", self.min_tokens, 0, self.max_tokens, f"an integer from 0 to `max_tokens`, {self.max_tokens}")
        if flag("ignore_eos", self.ignore_eos) and self.constraint and not self.stop_tokens:
            raise InputError("a grammar ends with a stop token: leave out `ignore_eos`, or pass `stop_tokens`")
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None")
        instance("processors", self.processors, (list, tuple), "a list of functions")
        for processor in self.processors:
            if not callable(processor):
                raise wrong("processors", processor, "a list of functions (tokens, logits) -> logits")

    def stops(self, text: Tokenizer) -> frozenset[int]:
        """All tokens that end the text."""
        return frozenset(self.stop_tokens) | (frozenset() if self.ignore_eos else text.eos)

    def thinking_budget(self, room: int) -> int | None:
        """Tokens of its thinking; None: any number.  Where an answer has to follow, half of all that may come, and have
        `room` in the context, are kept for it.
        """
        given = self.thinking.budget if self.thinking else None
        return min(self.max_tokens, room) // 2 if given is None and self.constraint else given

    def ending(self, text: Tokenizer) -> Ending:
        stops = self.stops(text)
        return Ending(text, self.max_tokens, self.stop, stop_tokens=stops, min_tokens=self.min_tokens, thinking=self.thinking)

    def sampler(self, sampling: Sampling, text: Tokenizer, prompt: int, context: int, sample: int = 0) -> Sampler:
        """A sampler for a text after `prompt` tokens of `context`; `sample`: which of several texts of that prompt."""
        stops = self.stops(text)
        matcher: Matcher | AfterThinking | None = None
        if self.thinking:
            matcher = self.thinking.within(self.thinking_budget(context - prompt)).matcher(prompt, stops, self.constraint)
        elif self.constraint:
            matcher = self.constraint.begin(prompt, stops)
        breakers = Breakers(text) if sampling.dry_multiplier else None
        return Sampler(sampling, Rules(prompt, self.min_tokens, stops, tuple(self.processors), matcher, breakers), sample)


def check_sampling(sampling: Any, vocab_size: int) -> None:
    """InputError: no Sampling, or one with a bias of a token that the vocabulary does not have."""
    instance("sampling", sampling, (Sampling, type(None)), "a Sampling, or None for what the file recommends")
    if sampling is not None:
        token_ids("logit_bias", list(sampling.logit_bias), vocab_size)
