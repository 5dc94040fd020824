"""The thinking at the head of an answer: it is free, and what holds for the answer holds for what follows it.

    prompt | <think> thinking </think> | empty line | answer

The mark that begins it is in the prompt, where the chat template writes it, or is the first token that comes, or does not come:
then the model answers at once.  Thinking that has used up its budget is ended, whatever the model would say next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeq.runtime.answers.constraint import Constraint, Matcher
from edgeq.text.thinking_formats import ThinkingFormat
from edgeq.text.tokenizer import Tokenizer

NEAR = 8
"""Tokens at the end of a prompt among which a template has its marks."""


@dataclass(frozen=True)
class Thinking:
    """How answers to a prompt think.

    begin, end   the marks
    gap          the token of the empty line that models write between thinking and answer; None: it takes several
    opened       the prompt ends within the thinking
    vocab_size   of the model
    budget       tokens that it may have at most, without its marks; None: any number
    """

    begin: int
    end: int
    gap: int | None
    opened: bool
    vocab_size: int
    budget: int | None = None

    @classmethod
    def of(cls, form: ThinkingFormat | None, text: Tokenizer, prompt: Sequence[int], vocab_size: int) -> Thinking | None:
        """None: the model does not think, or the prompt has ended the thinking."""
        if form is None:
            return None
        begin, end = text.control_token(form.begin), text.control_token(form.end)
        if begin is None or end is None or max(begin, end) >= vocab_size:
            return None
        near = reversed(prompt[-NEAR:])
        last = next((token for token in near if token in text.added_ids or text.decode([token]).strip()), -1)
        if last == end:
            return None
        line = text.encode_plain("\n\n")
        return cls(begin, end, line[0] if len(line) == 1 else None, last == begin, vocab_size)

    def within(self, budget: int | None) -> Thinking:
        """The same with a budget."""
        return replace(self, budget=budget)

    def matcher(self, start: int, stops: Collection[int], constraint: Constraint | None) -> AfterThinking | None:
        """What an answer after `start` tokens is held to; None: to nothing."""
        if constraint is None and self.budget is None:
            return None
        return AfterThinking(self, start, stops, constraint.begin(0, stops) if constraint else None)


class AfterThinking:
    """A Matcher that lets the thinking be, ends it when its budget is used up, and holds what follows to a grammar.

    As of a Matcher, what it answers depends on the tokens alone, so that drafts which are not accepted leave nothing behind.
    """

    def __init__(self, thinking: Thinking, start: int, stops: Collection[int], matcher: Matcher | None) -> None:
        """`matcher`: of the answer, which begins with its first token; None: any text."""
        self._thinking, self._start, self._matcher = thinking, start, matcher
        self._free = np.ones(thinking.vocab_size, np.bool_)
        if matcher:
            # An answer has to follow.
            self._free[[token for token in stops if token < thinking.vocab_size]] = False
        self._end = np.zeros(thinking.vocab_size, np.bool_)
        self._end[thinking.end] = True

    def prepare(self, history: Sequence[int]) -> None:
        """As of a Matcher."""
        answer = self._answer(history)
        if self._matcher and answer is not None:
            self._matcher.prepare(answer)

    def allowed(self, history: Sequence[int]) -> NDArray[np.bool_]:
        """As of a Matcher."""
        thinking, answer = self._thinking, self._answer(history)
        if answer is None:
            return self._end if self._spent(history) else self._free
        mask = self._matcher.allowed(answer) if self._matcher else np.ones(thinking.vocab_size, np.bool_)
        if len(history) == self._start:
            mask[thinking.begin] = thinking.budget != 0
        elif not answer and thinking.gap is not None and history[-1] == thinking.end:
            mask[thinking.gap] = True
        return mask

    def forced(self, history: Sequence[int]) -> list[int]:
        """As of a Matcher."""
        answer = self._answer(history)
        if answer is None:
            return [self._thinking.end] if self._spent(history) else []
        # What comes first may be the mark, or the empty line.
        return self._matcher.forced(answer) if self._matcher and answer else []

    def _begun(self, history: Sequence[int]) -> int | None:
        """Where the thinking begins; None: there is none."""
        if self._thinking.opened:
            return self._start
        return self._start + 1 if list(history[self._start : self._start + 1]) == [self._thinking.begin] else None

    def _spent(self, history: Sequence[int]) -> bool:
        budget, begun = self._thinking.budget, self._begun(history)
        return budget is not None and begun is not None and len(history) - begun >= budget

    def _answer(self, history: Sequence[int]) -> list[int] | None:
        """The tokens after the thinking; None: it goes on."""
        begun = self._begun(history)
        if begun is None:
            return list(history[self._start :])
        try:
            at = history.index(self._thinking.end, begun) + 1
        except ValueError:
            return None
        # The line is there once.
        return list(history[at + (list(history[at : at + 1]) == [self._thinking.gap]) :])


class Section:
    """Follows the tokens of an answer through its thinking, and says what is shown of both."""

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking, self._first = thinking, True
        self._within = thinking is not None and thinking.opened
        self._begun, self._space = not self._within, ""

    def take(self, token: int) -> tuple[bool, bool]:
        """Whether a token belongs to the thinking, and whether it is a mark, which is not shown."""
        first, self._first = self._first, False
        if self._thinking and ((first and token == self._thinking.begin) or (self._within and token == self._thinking.end)):
            self._within, self._begun, self._space = token == self._thinking.begin, False, ""
            return True, True
        return self._within, False

    def shown(self, text: str) -> str:
        """Text without the space around the thinking, and without that before the answer to which it led."""
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        kept = text.rstrip() if self._within else text
        self._space = text[len(kept) :]
        return kept
