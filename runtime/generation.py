"""One text as it is generated."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any

from edgeq.errors import InputError
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.answers.call_reader import CallReader, Event, Thought, message_of
from edgeq.runtime.answers.stopping import Ending, FinishReason, Piece
from edgeq.runtime.decode import Stepper, Stream
from edgeq.runtime.sampling import Logprobs
from edgeq.runtime.session.session import OnPrompt
from edgeq.runtime.stats import Measurement
from edgeq.system import machine


class _Closed(Exception):
    """Ends a prompt between two of its chunks."""


class Generation(Iterator[str]):
    """Text as it is generated; runs when it is iterated, by `for` or, within an event loop, `async for`.

    What a model thinks before it answers a chat is not part of the text: `pieces` has it, `thoughts` and `message`.

    `close`, which another thread may call too, or the end of a `with` block, ends it after the present run.

    tokens          tokens drawn so far, a stop token included
    logprobs        theirs, one for each, where they were asked for; else empty
    measurement     what it cost so far
    """

    def __init__(
        self,
        stream: Stream,
        prompt: Prompt,
        ending: Ending,
        stepper: Stepper,
        *,
        measurement: Measurement,
        positions_read: Callable[[int], float],
        started: float,
        on_progress: OnPrompt | None,
        reader: CallReader | None = None,
    ) -> None:
        """The tokens of `stream` are those of `prompt`.  `started`: when the caller began to wait (perf_counter).

        reader   knows calls of tools in it
        """
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self._given: list[Piece] = []
        self._closed = False
        self._reader, self._message = reader, dict[str, Any]()
        self.measurement = measurement
        self._stream, self._ending, self._stepper = stream, ending, stepper
        self._prompt: Prompt | None = prompt
        self._positions_read = positions_read
        self._pieces = self._run(started, on_progress)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs; "stop": a stop token or string came; "length": max_tokens; "context": it is full."""
        return self._ending.reason

    def pieces(self) -> Iterator[Piece]:
        """Every token with its text, for callers that want both; the same run as iterating over the text."""
        return self._pieces

    def text(self) -> str:
        """Run to the end; the whole text, with what was iterated over before."""
        for _ in self._pieces:
            pass
        return "".join(piece.text for piece in self._given if not piece.thought)

    @property
    def thoughts(self) -> str:
        """What was thought so far before the answer."""
        return "".join(piece.text for piece in self._given if piece.thought)

    def message(self) -> dict[str, Any]:
        """Run to the end; the answer as the next message of the conversation: role, content, where tools are called
        `tool_calls`, each with id, type and function: its name and its arguments as an object (as text where `max_tokens` cut
        them off), and where the model thought before, `reasoning_content`.
        """
        text = self.text()
        if not self._message:
            said = [(piece.text, piece.token) for piece in self._given if not piece.thought]
            events: list[Event] = self._reader.read(said) if self._reader else [text]
            self._message = message_of([Thought(self.thoughts), *events] if self.thoughts else events)
        return self._message

    def close(self) -> None:
        """End the text where it is: nothing more comes.  What was run stays in a session that was passed."""
        self._closed = True
        with suppress(ValueError):
            # A generator that another thread runs cannot be closed; it ends by itself.
            self._pieces.close()
            self._stream.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.finish_reason or ("closed" if self._closed else "not finished")
        return f"<Generation: {len(self.tokens)} tokens, {state}: {''.join(piece.text for piece in self._given)[-40:]!r}>"

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        """The next text that is not empty."""
        return next(piece.text for piece in self._pieces if piece.text and not piece.thought)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> str:
        """The next text that is not empty.  The model runs on another thread, so that the event loop goes on meanwhile.

        Who cancels the task that waits for it closes the text.
        """
        import asyncio

        try:
            text = await asyncio.get_running_loop().run_in_executor(None, next, self, None)
        except asyncio.CancelledError:
            self.close()
            raise
        if text is None:
            raise StopAsyncIteration
        return text

    def _run(self, started: float, on_progress: OnPrompt | None) -> Generator[Piece, None, None]:
        """Run the prompt, draw a token, then take decode steps until something ends the text."""
        stream, m, prompt, self._prompt = self._stream, self.measurement, self._prompt, None
        assert prompt is not None
        session, length = stream.session, len(stream.tokens)
        ticket = session.owner = object()
        m.cached_tokens = session.keep_prefix(prompt)

        def prefilled(done: int, total: int) -> None:
            if on_progress is not None:
                on_progress(done, total)
            if self._closed:
                raise _Closed

        before, seen = perf_counter(), session.vision_s
        try:
            logits = session.prefill(prompt.after(m.cached_tokens), prefilled)
        except _Closed:
            return self._stream.close()
        # Its pictures, which the prompt's record held, are not needed any more.
        del prompt
        m.vision_s = session.vision_s - seen
        m.prefill_s = perf_counter() - before - m.vision_s
        stream.draw(logits)
        tokens = stream.tokens[-1:]
        m.ttft_s = perf_counter() - started
        while True:
            drawn = stream.logprobs[-len(tokens) :]
            for i, token in enumerate(tokens):
                self.tokens.append(token)
                self.logprobs += drawn[i : i + 1]
                m.generated_tokens += 1
                self._given.append(self._ending.push(token, full=i + 1 == len(tokens) and not session.left))
                if self._ending.reason:
                    # What was accepted after the end is not part of the text.
                    session.rewind(length + len(self.tokens) - 1)
                    self._stream.close()
                yield self._given[-1]
                if self._ending.reason:
                    return
                if self._closed:
                    return self._stream.close()
            if stream.error:
                raise stream.error
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
        tokens = self._stepper.step([self._stream], [self._ending.room])[0]
        if self._stream.error and not tokens:
            raise self._stream.error
        seconds = perf_counter() - before
        m.decode_s += seconds
        m.token_s += [seconds / len(tokens)] * len(tokens)
        # Without drafts a step is one run, which no statistics count.
        runs = m.speculation.runs - runs or 1
        m.decode_steps += runs
        m.decode_tokens += len(tokens)
        m.context_positions += runs * self._positions_read(len(self._stream.session.tokens))
        return tokens
