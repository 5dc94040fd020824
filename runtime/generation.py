"""One text as it is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NamedTuple

from edgeq import machine
from edgeq.errors import InputError
from edgeq.runtime.decode import DecodeStep, Stream
from edgeq.runtime.session import OnPrompt
from edgeq.runtime.stats import Measurement
from edgeq.runtime.stopping import Ending, FinishReason


class Piece(NamedTuple):
    """A token and the text that it made complete, often none."""

    text: str
    token: int


class Generation(Iterator[str]):
    """Text as it is generated; runs when it is iterated.

    tokens          tokens drawn so far, a stop token included
    measurement     what it cost so far
    """

    def __init__(
        self,
        stream: Stream,
        ending: Ending,
        step: DecodeStep,
        measurement: Measurement,
        positions_read: Callable[[int], float],
        started: float,
        on_progress: OnPrompt | None,
    ) -> None:
        """The tokens of `stream` are the prompt.  `started`: when the caller began to wait (perf_counter)."""
        self.tokens: list[int] = []
        self.measurement = measurement
        self._stream, self._ending, self._step = stream, ending, step
        self._positions_read = positions_read
        self._pieces = self._run(started, on_progress)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs; "stop": a stop token or string came; "length": max_tokens; "context": it is full."""
        return self._ending.reason

    def pieces(self) -> Iterator[Piece]:
        """Every token with its text, for callers that want both; the same run as iterating over the text."""
        return self._pieces

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        """The next text that is not empty."""
        return next(piece.text for piece in self._pieces if piece.text)

    def _run(self, started: float, on_progress: OnPrompt | None) -> Iterator[Piece]:
        """Run the prompt, draw a token, then take decode steps until something ends the text."""
        stream, m = self._stream, self.measurement
        session, prompt = stream.session, len(stream.tokens)
        ticket = session.owner = object()
        m.cached_tokens = session.keep_prefix(stream.tokens)
        before = perf_counter()
        logits = session.prefill(stream.tokens[m.cached_tokens :], on_progress)
        m.prefill_s = perf_counter() - before
        tokens = [stream.sampler.draw(logits, stream.tokens)]
        stream.tokens += tokens
        m.ttft_s = perf_counter() - started
        while True:
            for i, token in enumerate(tokens):
                self.tokens.append(token)
                m.generated_tokens += 1
                text = self._ending.push(token, full=i + 1 == len(tokens) and not session.left)
                if self._ending.reason:
                    # What was accepted after the end is not part of the text.
                    session.trim(prompt + len(self.tokens) - 1)
                yield Piece(text, token)
                if self._ending.reason:
                    return
            if session.owner is not ticket or len(session.tokens) + 1 != len(stream.tokens):
                raise InputError("its session has run another text in the meantime; give each text a session of its own")
            self._requantize()
            tokens = self._decode()

    def _requantize(self) -> None:
        """After the first token, which the prompt's own run gives: it does not wait for this."""
        m, session = self.measurement, self._stream.session
        seconds = session.requantize()
        m.requantize_s += seconds
        m.requantized_tokens = session.requantized_tokens
        m.copy_bytes = session.weights.nbytes if session.weights else 0
        if seconds:
            memory = machine.process_memory()
            m.anonymous_bytes, m.peak_bytes = memory.get("RssAnon", 0), memory.get("VmHWM", 0)

    def _decode(self) -> list[int]:
        m = self.measurement
        before, runs = perf_counter(), m.speculation.runs
        tokens = self._step([self._stream], [self._ending.room])[0]
        m.decode_s += perf_counter() - before
        # Without drafts a step is one run, which no statistics count.
        runs = m.speculation.runs - runs or 1
        m.decode_steps += runs
        m.decode_tokens += len(tokens)
        m.context_positions += runs * self._positions_read(len(self._stream.session.tokens))
        return tokens
